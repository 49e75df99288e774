"""What can go wrong, by name. Every message says what came, why it cannot work and what would."""


class MaclaurinError(ValueError):
    """Base of every error this library raises on purpose."""


class SpecError(MaclaurinError):
    """Parts that are fine one by one but mean nothing together."""


class NotationError(SpecError):
    """A string that is not the notation of a spec; the message has a caret under the place."""

    def __init__(self, text: str, position: int, reason: str) -> None:
        self.text, self.position, self.reason = text, position, reason
        super().__init__(f"{reason}\n    {text}\n    {' ' * position}^")


class InputError(MaclaurinError):
    """Tensors that do not fit each other or the spec."""


class NoFiniteStateError(MaclaurinError):
    """A recurrent form was asked of a spec that has none."""


class StateBudgetError(MaclaurinError):
    """The recurrent state would be larger than the caller allows."""
