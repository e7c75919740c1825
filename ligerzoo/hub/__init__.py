"""Loads and saves models in Hugging Face format, from and to directories, the Hugging Face hub, and memory."""

from ligerzoo.exports import renamed
from ligerzoo.hub.auto import AutoModel as AutoModel
from ligerzoo.hub.auto import AutoModelForEmbedding as AutoModelForEmbedding
from ligerzoo.hub.auto import AutoModelForMaskedLM as AutoModelForMaskedLM
from ligerzoo.hub.auto import AutoModelForSequenceClassification as AutoModelForSequenceClassification
from ligerzoo.hub.auto import AutoModelForTokenClassification as AutoModelForTokenClassification
from ligerzoo.hub.description import read_config as read_config
from ligerzoo.hub.loading import load as load
from ligerzoo.hub.loading import load_on_meta as load_on_meta
from ligerzoo.hub.saving import save as save
from ligerzoo.hub.sharing import from_transformers as from_transformers
from ligerzoo.hub.state import hf_state_dict as hf_state_dict
from ligerzoo.hub.state import iterate_hf_state_dict as iterate_hf_state_dict
from ligerzoo.hub.state import load_hf_state_dict as load_hf_state_dict
from ligerzoo.hub.uploading import push as push
from ligerzoo.models.pretrained import LoadedFrom as LoadedFrom
from ligerzoo.models.pretrained import Saveable as Saveable

__getattr__ = renamed(__name__, {"Origin": "LoadedFrom"})
