"""A part is a small frozen dataclass with a name in the notation: `taylor(2,about=mean)`.

Fields declare how they are written, so that printing, parsing, JSON and error messages follow
from the class alone:

    @register
    @final
    @dataclass(frozen=True, slots=True)
    class Taylor(Kernel):
        notation = "taylor"
        order: int = whole(at_least=0)
        about: str = choice("zero", "mean")
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, final

from maclaurin.errors import SpecError
from maclaurin.wording import did_you_mean

if TYPE_CHECKING:
    from maclaurin.spec.attention_spec import AttentionSpec

Reader = Callable[[str], Any]
PartType = TypeVar("PartType", bound="type[Part]")
_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Part(ABC):
    """One term of the formula: a name in the notation, its fields, and the tensors it takes.

    Families (kernel, window, gate, denominator, norm) are abstract subclasses that say what else a part
    must define. A part that leaves some of it out cannot be built.
    """

    #: the part's name
    notation: ClassVar[str]
    #: what kind of part it is
    family: ClassVar[str]
    #: the sign before it in the notation: + * / or none
    mark: ClassVar[str] = ""
    #: its place in the formula, counted from the inside out
    stage: ClassVar[int] = 0

    @classmethod
    def declared_argument(cls) -> Argument | None:
        """The tensor that parts of this class take besides q, k and v."""
        return None

    @classmethod
    def check_class(cls) -> None:
        """Raise SpecError if the class's declarations are inconsistent; `register` calls it."""
        if cls.declared_argument() is None and getattr(cls, "argument", None) is not None:
            raise SpecError(
                f"the {cls.family} {cls.__qualname__} declares an argument, but a {cls.family} gets none."
            )

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The tensors it takes besides q, k and v."""
        argument = self.declared_argument()
        return () if argument is None else (argument,)

    def check(self, spec: AttentionSpec) -> None:
        """Raise SpecError if the part makes no sense with the other parts of the spec."""
        return

    def __post_init__(self) -> None:
        """A part made in Python obeys the same rules as one that was parsed."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata.get("flag") and not isinstance(value, bool):
                raise SpecError(f"{self.notation}: {field.name} is on or off, not {value!r}.")
            if field.metadata.get("flag") or (not _is_required(field) and value == field.default):
                continue
            if field.metadata.get("variadic"):
                checked: Any = tuple(_read(type(self), field, written(v)) for v in list(value))  # type: ignore
            else:
                checked = _read(type(self), field, written(value))
            object.__setattr__(self, field.name, checked)

    def __str__(self) -> str:
        written = list(_written_fields(self))
        return f"{self.notation}({','.join(written)})" if written else self.notation

    def to_dict(self) -> dict[str, Any]:
        """The part as plain data: its name and the fields that differ from their defaults."""
        values = {f: getattr(self, f.name) for f in dataclasses.fields(self)}
        kept = {f.name: _plain(value) for f, value in values.items() if value != f.default}
        return {"name": self.notation, **kept}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of to_dict; unknown keys are errors."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        positional: list[str] = []
        named: dict[str, str] = {}
        for name, value in data.items():
            if name == "name":
                continue
            if name in known and known[name].metadata.get("variadic"):
                if not isinstance(value, list | tuple):
                    raise SpecError(f"{cls.notation}: {name} is a list of numbers, not {value!r}.")
                positional = [written(v) for v in value]
            elif name in known and known[name].metadata.get("flag"):
                if not isinstance(value, bool):
                    raise SpecError(f"{cls.notation}: {name} is true or false, not {value!r}.")
                positional += [name] if value else []
            else:
                named[name] = written(value)
        return cls.from_arguments(positional, named)

    @classmethod
    def from_arguments(cls, positional: list[str], named: Mapping[str, str]) -> Self:
        """Build the part from the arguments between its parentheses."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        if variadic := next((f for f in fields.values() if f.metadata.get("variadic")), None):
            values: dict[str, Any] = {variadic.name: tuple(_read(cls, variadic, p) for p in positional)}
        else:
            values = _bind_positional(cls, list(fields.values()), positional)
        for name, text in named.items():
            if name not in fields:
                raise SpecError(_unknown_option(cls, name), place=name)
            if name in values:
                raise SpecError(f"{cls.notation} got {name} twice.", place=name)
            values[name] = _read(cls, fields[name], text)
        missing = [n for n, f in fields.items() if n not in values and _is_required(f)]
        if missing:
            raise SpecError(f"{cls.notation} needs {missing[0]}: {cls.usage()}.")
        return cls(**values)

    @classmethod
    def usage(cls) -> str:
        """How the part is written, for error messages and help."""
        shown = [f.metadata["usage"].format(name=f.name) for f in dataclasses.fields(cls)]
        return f"{cls.notation}({', '.join(shown)})" if shown else cls.notation


def whole(default: Any = _REQUIRED, *, at_least: int = 0, at_most: int | None = None) -> Any:
    """A field holding an integer from at_least to at_most."""

    def read(text: str) -> int:
        value = int(text)
        if value < at_least or (at_most is not None and value > at_most):
            raise ValueError
        return value

    limit = "" if at_most is None else f" and ≤ {at_most}"
    return _field(default, read, f"a whole number ≥ {at_least}{limit}")


def number(default: Any = _REQUIRED) -> Any:
    """A field holding a finite real number."""
    return _field(default, _finite, "a number")


def positive(default: Any = _REQUIRED) -> Any:
    """A field holding a positive real number."""

    def read(text: str) -> float:
        value = _finite(text)
        if value <= 0:
            raise ValueError
        return value

    return _field(default, read, "a positive number")


def numbers() -> Any:
    """A field holding one or more real numbers, written one after the other."""
    metadata = {"read": _finite, "expects": "numbers", "variadic": True, "usage": "a0, a1, …"}
    return dataclasses.field(metadata=metadata)


def choice(*words: str) -> Any:
    """A field holding one of a few words; the first is the default."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return _field(words[0], read, " or ".join(words))


def flag() -> Any:
    """A field that is written as its bare name when it is on."""
    metadata = {"read": _no_value, "expects": "no value", "flag": True, "usage": "{name}"}
    return dataclasses.field(default=False, metadata=metadata)


def option(default: Any, read: Reader, expects: str) -> Any:
    """An optional field with its own reader."""
    return _field(default, read, expects)


def required(read: Reader, expects: str) -> Any:
    """A required field with its own reader."""
    return _field(_REQUIRED, read, expects)


# ------------------------------------------------------------------------------------ registry

#: families and the classes to subclass
_FAMILIES = {
    "kernel": "Kernel",
    "feature map": "FeatureMap",
    "window": "Window",
    "gate": "ValueGate, DecayGate or RowGate",
    "denominator": "Denominator",
    "norm": "Norm",
}
_FAMILY_CLASSES = ", ".join(_FAMILIES.values())
#: a name that the notation can read
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: the keywords of `attention`, which no argument of a part may be called
KEYWORDS = (
    "q", "k", "v", "spec", "state", "return_state", "scale", "causal", "cu_seqlens", "max_seqlen",
    "key_padding_mask", "form", "chunk_size", "tolerance", "score_bound", "state_budget", "layout", "gates",
)  # fmt: skip

_registry: dict[str, dict[str, type[Part]]] = {}
_reserved: dict[str, str] = {}


def register(part: PartType) -> PartType:
    """Add a part to the notation under its name. A name that is taken is an error, not an overwrite.

    The same class defined again, as when a notebook cell is run twice, replaces the earlier one.
    """
    family = getattr(part, "family", None)
    if family not in _FAMILIES:
        raise SpecError(f"{part.__qualname__} belongs to no family: subclass one of {_FAMILY_CLASSES}.")
    notation = getattr(part, "notation", None)
    if notation is None:
        raise SpecError(f'the {family} {part.__qualname__} has no name: give it notation = "…".')
    if not isinstance(notation, str) or not _NAME.fullmatch(notation):
        raise SpecError(f"a part cannot be called {notation!r}: use letters from a to z, digits and _.")
    missing = sorted(getattr(part, "__abstractmethods__", ()))
    if missing:
        raise SpecError(
            f"the {family} {part.__qualname__} cannot be registered without its meaning: "
            f"define {', '.join(missing)}."
        )
    if part.arguments is not Part.arguments:
        raise SpecError(f"the {family} {part.__qualname__} overrides `arguments`: declare `argument`.")
    _check_fields(part)
    part.check_class()
    _require_free(part)
    _registry.setdefault(part.family, {})[part.notation] = part
    for forget in _after_registration:
        forget()
    return part


def _check_fields(part: type[Part]) -> None:
    """Raise unless every field says how it is read from the notation."""
    what = f"the {part.family} {part.__qualname__}"
    if any(isinstance(value, dataclasses.Field) for value in vars(part).values()):
        raise SpecError(
            f"{what} has fields but is not a dataclass: put @dataclass(frozen=True, slots=True) between "
            "@register and the class."
        )
    for field in dataclasses.fields(part):
        if "read" not in field.metadata:
            raise SpecError(
                f"{what}: the notation cannot read its field {field.name}. Declare how it is read, as in "
                f"{field.name}: float = number(default=1.0), or with whole(), positive(), numbers(), "
                f"choice() or flag(); a constant of the class is {field.name}: ClassVar[float]."
            )


def _require_free(part: type[Part]) -> None:
    """Raise if another part with the same mark has the name, or the catalogue has it."""
    same_mark = (known.get(part.notation) for known in _registry.values())
    for known in same_mark:
        if known is None or known.mark != part.mark:
            continue
        if (known.__module__, known.__qualname__) != (part.__module__, part.__qualname__):
            raise SpecError(
                f"{part.notation} is already the {known.family} {known.__qualname__}; "
                "give the new one another notation."
            )
    if not part.mark and part.notation in _reserved:
        raise SpecError(
            f"{part.notation} is already {_reserved[part.notation]}, which would hide the new "
            f"{part.family}; give it another notation."
        )


def reserve_names(names: Iterable[str], owner: str) -> None:
    """Refuse these names, such as those of the catalogue, to parts that are registered later."""
    _reserved.update(dict.fromkeys(names, owner))


_after_registration: list[Callable[[], None]] = []


def after_registration(forget: Callable[[], None]) -> None:
    """Call `forget` whenever a part is registered: texts parsed before may mean something else now."""
    _after_registration.append(forget)


def registered(family: str) -> dict[str, type[Part]]:
    """The parts of one family by name."""
    return dict(_registry.get(family, {}))


# ------------------------------------------------------------------------------------- details


def _field(default: Any, read: Reader, expects: str) -> Any:
    required_ = default is _REQUIRED
    metadata = {"read": read, "expects": expects, "usage": "{name}" if required_ else "{name}=…"}
    if required_:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _no_value(text: str) -> bool:
    if text:
        raise ValueError
    return True


def split_arguments(text: str) -> tuple[str, list[str], dict[str, str]]:
    """name(a, b=c) as its name, its arguments without a name, and those with one."""
    name, opened, rest = text.strip().partition("(")
    positional: list[str] = []
    named: dict[str, str] = {}
    inside = rest.rstrip().removesuffix(")").strip() if opened else ""
    for argument in inside.split(",") if inside else ():
        key, equals, value = (piece.strip() for piece in argument.partition("="))
        if equals:
            named[key] = value
        else:
            positional.append(key)
    return name.strip(), positional, named


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING


def _bind_positional(
    cls: type[Part], fields: list[dataclasses.Field[Any]], positional: list[str]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    in_order = [f for f in fields if not f.metadata.get("flag")]
    flags = {f.name: f for f in fields if f.metadata.get("flag")}
    for text in positional:
        if text in flags:
            values[text] = True
        elif in_order:
            field = in_order.pop(0)
            values[field.name] = _read(cls, field, text)
        else:
            raise SpecError(
                f"{cls.notation} does not take {text!r}; it is written {cls.usage()}.", place=text
            )
    return values


def _read(cls: type[Part], field: dataclasses.Field[Any], text: str) -> Any:
    try:
        return field.metadata["read"](text)
    except SpecError:
        raise
    except ValueError:
        near = did_you_mean(text, field.metadata["expects"].split(" or "))
        raise SpecError(
            f"{cls.notation}: {field.name} must be {field.metadata['expects']}, not {text!r}.{near}",
            place=text,
        ) from None


def _unknown_option(cls: type[Part], name: str) -> str:
    known = [f.name for f in dataclasses.fields(cls)]
    return f"{cls.notation} has no option {name!r}; it is written {cls.usage()}." + did_you_mean(name, known)


def _written_fields(part: Part) -> Iterator[str]:
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.metadata.get("variadic"):
            yield from (written(v) for v in value)
        elif field.metadata.get("flag"):
            if value:
                yield field.name
        elif _is_required(field):
            yield written(value)
        elif value != field.default:
            yield f"{field.name}={written(value)}"


def written(value: Any) -> str:
    """A field's value in the notation: 5 for 5.0, else the shortest text that reads back."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e16 else repr(value)
    return str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Part) else value


Side = Literal["query", "key"]


class Recipe(enum.Enum):
    """How a layer makes an argument from the token x, one number per head unless stated otherwise."""

    LINEAR = "Wx + b"
    SIGMOID = "σ(Wx + b)"
    LOG_SIGMOID = "ln σ(Wx + b)"
    LOG_SIGMOID_16 = "ln σ(Wx + b)/16"
    MINUS_SOFTPLUS = "−softplus(Wx + b)"
    LINEAR_1024 = "Wx/1024"
    STEP_SIZE = "dt = softplus(Wx + b)"
    MINUS_STEP_SIZE = "−dt·A, dt = softplus(Wx + b), A per head"
    FIXED_DECAY = "ln(1 − 2^(−5−h)), fixed for head h"
    LENGTH_POWER = "t^−σ(p), p per head, initially 0.5"
    SILU = "silu(Wx), one number per channel"


@final
@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor [B, tokens, heads] that `attention` takes by name.

    `symbol` is how formulas write it, with the index of its token: s for a value, r for a decay, t for a row.
    `tokens` and `heads` are those of the queries or of the keys. With `per_channel` it may also be
    [B, tokens, heads, e]. With `running`, a part gets ln Σ_{r≤t} e^{g_r} instead of g_t. `recipe` says how a
    layer makes it from the token.
    """

    name: str
    symbol: str
    tokens: Side
    heads: Side
    per_channel: bool = False
    running: bool = False
    recipe: Recipe = Recipe.SIGMOID


def check_argument(
    part: type[Part],
    argument: object,
    *,
    tokens: Side,
    heads: Side | None,
    per_channel: bool,
    running: bool = False,
) -> None:
    """Raise SpecError unless such a part can be given the argument; heads=None allows both sides."""
    what = f"the {part.family} {part.__qualname__}"
    if not isinstance(argument, Argument):
        raise SpecError(f"{what} must declare the tensor it takes: argument = Argument(…).")
    name = argument.name
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{what}: its argument cannot be called {name!r}: use letters from a to z, digits and _."
        )
    if name in KEYWORDS:
        raise SpecError(f"{what}: its argument cannot be called {name!r}, which is a keyword of attention.")
    if argument.tokens != tokens:
        raise SpecError(
            f"{what}: its argument {name} needs tokens={tokens!r}, those of the {_SIDES[tokens]}."
        )
    if heads is not None and argument.heads != heads:
        raise SpecError(f"{what}: its argument {name} needs heads={heads!r}, those of the {_SIDES[heads]}.")
    if argument.per_channel and not per_channel:
        raise SpecError(f"{what}: its argument {name} has one number per head, so it cannot be per_channel.")
    if argument.recipe is Recipe.SILU and not argument.per_channel:
        remedy = "set per_channel=True or use another recipe" if per_channel else "use another recipe"
        raise SpecError(
            f"{what}: its argument {name} has one number per head, but Recipe.SILU makes one per channel: "
            f"{remedy}."
        )
    if argument.running and not running:
        raise SpecError(f"{what}: only the argument of a denominator can be running, not {name}.")


_SIDES = {"query": "queries", "key": "keys"}
