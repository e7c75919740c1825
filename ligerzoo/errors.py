"""The one small family of errors that ligerzoo raises for bad input.

Every message names what went wrong, where, what was found against what was expected, and what to do about it.
A failed internal invariant (our own bug) is an `AssertionError` instead.
"""


class LigerzooError(ValueError):
    """Bad input, told in one message.

    Args:
        what: the problem in a few words.
        where: the file, tensor, field or argument at fault.
        got: what was found there.
        expected: what should have been there.
        remedy: what the user can do.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        got: object = None,
        expected: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what, self.where, self.got, self.expected, self.remedy = what, where, got, expected, remedy
        message = _shortened(what) if where is None else f"{_shortened(where)}: {_shortened(what)}"
        if got is not None:
            message += f"; got {_shortened(got)}"
        if expected is not None:
            message += f"; expected {expected}"
        if remedy is not None:
            message += f". {remedy}"
        super().__init__(message)


def _shortened(part: object) -> str:
    """Parts of a message that come from files have no end to rely on."""
    text = str(part)
    return text if len(text) <= 1000 else text[:1000] + "..."


class ConfigError(LigerzooError):
    """A field of a configuration is missing, malformed or asks for something that is not supported."""


class CheckpointError(LigerzooError):
    """A checkpoint's files are missing, malformed, or do not fit the architecture their config names."""


class TokenizerError(LigerzooError):
    """A tokenizer's files are missing or malformed, or its input cannot be encoded as asked."""


class ImageError(LigerzooError):
    """An image or video cannot be read, does not fit the prompt, or is of a size that the model does not take."""
