"""Converter for Seed-OSS checkpoints. Names of tensors and config.json entries match ours."""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.models.seed_oss import SeedOss, SeedOssConfig

ARCHITECTURE = Architecture("seed_oss", "SeedOssForCausalLM", SeedOss, SeedOssConfig)
