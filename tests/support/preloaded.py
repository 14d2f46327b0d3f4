"""What ranks begin with: the server that forks them (`pool.py`) imports this module once."""

import contextlib
import gc
import importlib
import sys
from pathlib import Path

FOLDER = str(Path(__file__).parent)
# Of frameworks, what most ranks import; what a trace and its first plan import.
NAMES = ["ascend_parallel.training.checkpoint", "pytest", "hypothesis"]
NAMES += ["megatron.core.models.gpt.gpt_model", "megatron.core.models.gpt.gpt_layer_specs", "scipy.optimize"]
NAMES += ["torch.export._trace", "sympy.tensor.tensor"]
NAMES += [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mixtral", "gpt2")]
# Of this folder, what most tests import, with assertions as in a test.
SUPPORT = ["pool", "megatron_cpu", "layers", "gpt_training", "hugging_face", "sharded_models"]

gc.disable()
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
importlib.import_module("rewriting").install()
for name in (*NAMES, *SUPPORT):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
# None of it is garbage: a rank does not look for any in it, nor copies its pages to do so.
gc.enable()
gc.freeze()
