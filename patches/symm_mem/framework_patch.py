"""torch's async tensor-parallel operators as a framework of COC_FRAMEWORKS, which has to name them."""

from __future__ import annotations

from ascend_parallel.patches.base import PatchError, PatchSet, PatchStatus
from ascend_parallel.patches.framework_patch import AppliedPatches, FrameworkPatch
from ascend_parallel.settings import Settings
from ascend_parallel_autoload import frameworks

TITLE = frameworks.SYMM_MEM.title


class SymmMemPatches(AppliedPatches):
    """The registration of the operators' kernels: see `ascend_parallel.register_symm_mem`."""

    def __init__(self, settings: Settings) -> None:
        """Nothing is registered yet; the kernels read the settings in force at each call."""
        if no_tree := settings.arithmetic.forbids(f"{TITLE} multiplies weight gradients itself, in one call each"):
            asked = settings.arithmetic.asked
            raise PatchError(f"COC_FRAMEWORKS=symm_mem is not allowed with {asked}: {no_tree}: unset one of the two")
        super().__init__(TITLE, "", PatchSet(TITLE, None, []))
        self._registered: tuple[str, ...] = ()

    def apply(self) -> None:
        """Register the kernels that torch lacks."""
        from ascend_parallel.patches.symm_mem.registration import REGISTRATION  # imports torch's private library

        self._registered = REGISTRATION.register()

    def revert(self) -> None:
        """Take the kernels back."""
        from ascend_parallel.patches.symm_mem.registration import REGISTRATION

        REGISTRATION.unregister()
        self._registered = ()

    def status(self) -> list[PatchStatus]:
        """Return the status of each kernel."""
        return [PatchStatus(name, True, "runs this package's operator") for name in self._registered]

    def state(self) -> str:
        """Return in words how many kernels are registered."""
        return f"{len(self._registered)} kernels of {TITLE} registered"


SYMM_MEM = FrameworkPatch.of(frameworks.SYMM_MEM, SymmMemPatches)
