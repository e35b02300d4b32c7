"""Which tensors an adapter's file holds, and whether they fit together, its config and a model: names and shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.errors import AdapterError
from shared.lora.files import WEIGHTS_FILE
from shared.lora.peft_config import CONFIG_FILE, PeftConfig

_PREFIX = "base_model.model."
#: A module's tensors. PEFT saves the layer itself beside the adapters of embedding and head.
_ENDS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "A",
    ".lora_embedding_B": "B",
    ".base_layer.weight": "base",
}
#: Most names in a message, and most characters of one: a header may hold a name of megabytes.
_NAMED, _NAME_CHARACTERS = 5, 128


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors of a file by what they are for.

    Attributes:
        pairs: by module the names of A and B.
        copies: by module the name of a copy of the layer itself.
    """

    pairs: Mapping[str, tuple[str, str]]
    copies: Mapping[str, str]

    @property
    def modules(self) -> list[str]:
        """All modules that the file names, sorted."""
        return sorted(self.pairs.keys() | self.copies)


def layout_of(tensors: Iterable[str]) -> Layout:
    """Sort the tensors of a file by name.

    Raises:
        AdapterError: one is no LoRA matrix, one of a pair is missing, or there are none.
    """
    found: dict[str, dict[str, str]] = {"A": {}, "B": {}, "base": {}}
    strange = []
    for name in tensors:
        module, kind = _kind(name.removeprefix(_PREFIX))
        if kind is None or not name.startswith(_PREFIX):
            strange.append(name)
        else:
            found[kind][module] = name
    if strange:
        names = _listed(sorted(strange))
        raise AdapterError(f"{WEIGHTS_FILE}: {names}: not a LoRA matrix of PEFT's (modules_to_save, DoRA, bias?)")
    if alone := sorted(found["A"].keys() ^ found["B"].keys()):
        raise AdapterError(f"{WEIGHTS_FILE}: {_listed(alone)}: one of lora_A and lora_B is missing")
    if not found["A"]:
        raise AdapterError(f"{WEIGHTS_FILE}: it holds no LoRA matrices")
    return Layout({module: (a, found["B"][module]) for module, a in found["A"].items()}, found["base"])


def check_modules(config: PeftConfig, modules: list[str], known: Collection[str]) -> None:
    """All of the adapter must have its place in the model, and all that the config names must be there.

    Raises:
        AdapterError: it is not so; the message names the modules.
    """
    if unknown := [module for module in modules if module not in known]:
        raise AdapterError(f"{WEIGHTS_FILE}: {_listed(unknown)}: the model has no such module")
    wanted = config.target_modules
    if wanted is None or isinstance(wanted, str):
        if wanted is None or wanted == "all-linear":
            return
        if not all(config.patterns.matches("target_modules", wanted, module) for module in modules):
            raise AdapterError(f"{CONFIG_FILE}: target_modules does not match the modules of {WEIGHTS_FILE}")
        return
    missing = sorted(name for name in wanted if not any(_ends_with(module, name) for module in modules))
    extra = [module for module in modules if not any(_ends_with(module, name) for name in wanted)]
    if missing:
        raise AdapterError(f"{CONFIG_FILE}: target_modules: {_listed(missing)}: there are no weights for it")
    if extra:
        raise AdapterError(f"{WEIGHTS_FILE}: {_listed(extra)}: not among the config's target_modules")


def check_pair(config: PeftConfig, module: str, a: Sequence[int], b: Sequence[int], inputs: int, outputs: int) -> int:
    """Compare a module's two shapes with what its rank and the model ask for; answers the rank.

    Raises:
        AdapterError: they differ.
    """
    rank = config.rank(module)
    for half, shape, wanted in (("A", a, (rank, inputs)), ("B", b, (outputs, rank))):
        if tuple(shape) != wanted:
            raise AdapterError(
                f"{WEIGHTS_FILE}: lora_{half} of {module} has shape {list(shape)}, {list(wanted)} is needed"
            )
    return rank


def check_copy(module: str, shape: Sequence[int], own: Sequence[int] | None) -> None:
    """A layer that the adapter brings must have the model's own shape; None: the model expects no copy of it.

    Raises:
        AdapterError: it has not.
    """
    if own is None:
        raise AdapterError(f"{WEIGHTS_FILE}: {module}: a copy of this layer is not expected")
    if list(shape) != list(own):
        raise AdapterError(f"{WEIGHTS_FILE}: {module}: resized to {list(shape)}, the model's is {list(own)}")


def check_rank(rank: int, most: int, field: str = "r") -> None:
    """Raises AdapterError for a rank above the largest that is served; `field` of the config says the rank."""
    if rank > most:
        raise AdapterError(f"{field}: the adapter's rank is {rank}, at most {most} is served (max_lora_rank)")


def not_finite(half: str, module: str) -> AdapterError:
    """What is said of a matrix with infinities, what is no number at all, or what the model's dtype cannot hold."""
    return AdapterError(f"{WEIGHTS_FILE}: lora_{half} of {module} holds what is not a finite number")


def not_finite_scaled(module: str) -> AdapterError:
    """What is said of a matrix that its scale makes infinite."""
    return AdapterError(f"{WEIGHTS_FILE}: lora_B of {module} is not finite once it is scaled")


def _kind(name: str) -> tuple[str, str | None]:
    """Module and kind of a tensor; no kind for one that is not known."""
    for end, kind in _ENDS.items():
        if name.endswith(end):
            return name.removesuffix(end), kind
    return name, None


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    shown = (name if len(name) <= _NAME_CHARACTERS else f"{name[:_NAME_CHARACTERS]}..." for name in names[:_NAMED])
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
