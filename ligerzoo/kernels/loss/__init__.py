"""The parts of the chunked loss head: products, row kernel, weight-gradient accumulator, reductions."""
