"""Training on several processes: FSDP2, loading and saving shards, and operations over sharded tensors.

context_parallel the tokens of rows divided over processes
processes      the processes of a run, from torchrun's environment
fsdp           shards a model with FSDP2
copy_engines   communication of FSDP2 between the GPUs of one host, without their multiprocessors
mesh           a mesh of all processes, and a model over it
loading        loads and initializes sharded models: each process reads its part
liveness       ends all processes when one has died
host_copies    copies of tensors on the host, which are saved behind the training
directories    replaces a directory atomically, written by all processes
states         saves and loads optimizer states, and other tensors, of sharded models
tensor         each process computes a part of every layer; divided_layer and expert have the parts
vocab_parallel a loss head whose vocabulary is sharded
"""

from ligerzoo.parallel.context_parallel import context_parallel as context_parallel
from ligerzoo.parallel.directories import replacing_directory_together as replacing_directory_together
from ligerzoo.parallel.fsdp import accumulating as accumulating
from ligerzoo.parallel.fsdp import keep_gathered as keep_gathered
from ligerzoo.parallel.fsdp import reshard as reshard
from ligerzoo.parallel.fsdp import shard_model as shard_model
from ligerzoo.parallel.fsdp import unsharded as unsharded
from ligerzoo.parallel.loading import initialize_sharded as initialize_sharded
from ligerzoo.parallel.loading import load_sharded as load_sharded
from ligerzoo.parallel.mesh import MeshSizes as MeshSizes
from ligerzoo.parallel.mesh import make_mesh as make_mesh
from ligerzoo.parallel.mesh import parallelize as parallelize
from ligerzoo.parallel.processes import Processes as Processes
from ligerzoo.parallel.processes import barrier as barrier
from ligerzoo.parallel.processes import failing_together as failing_together
from ligerzoo.parallel.processes import gather_objects as gather_objects
from ligerzoo.parallel.processes import items_per_process as items_per_process
from ligerzoo.parallel.processes import start_processes as start_processes
from ligerzoo.parallel.processes import stop_processes as stop_processes
from ligerzoo.parallel.states import load_optimizer as load_optimizer
from ligerzoo.parallel.states import load_tensors as load_tensors
from ligerzoo.parallel.states import save_optimizer as save_optimizer
from ligerzoo.parallel.states import save_tensors as save_tensors
from ligerzoo.parallel.vocab_parallel import (
    vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy,
)
