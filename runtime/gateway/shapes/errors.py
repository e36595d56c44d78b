"""What an error looks like."""

from .common import Answer


class ErrorDetail(Answer, frozen=True, kw_only=True):
    """What is wrong and what helps; `param`: the field at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Answer, frozen=True, kw_only=True):
    """The body of every answer with a status of 400 or more, and of an event that ends a stream."""

    error: ErrorDetail
