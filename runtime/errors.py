"""What goes wrong through a caller's doing, told apart from faults of the engine."""


class RequestError(ValueError):
    """A request cannot be served as asked; the text names the field and the remedy. Only this request is affected."""


class CapacityError(RuntimeError):
    """The device's memory does not hold what the options ask for; the text says how much is missing and what would free it."""
