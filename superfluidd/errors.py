"""The error tree, sorted by who can act, with the codes each error carries onto a wire.

Every class states three things once: the HTTP status, OpenAI's ``type`` word and a stable machine ``code``. The
HTTP edge and the control plane turn an instance into their own envelope; nothing else in the house formats errors.

* :class:`ClientError`: the caller can fix it. The message says what to do next.
* :class:`ServiceError`: the service cannot serve it now. The message says whether to retry.
* :class:`StartupError`: the operator can fix it; ``exit_code`` is what ``superfluidd`` exits with.
"""

from __future__ import annotations

from typing import ClassVar


class SuperfluidError(Exception):
    """Root of every error a caller may see."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The request field at fault, as the client spelled it."""
        self.retry_after = retry_after
        """Seconds after which a retry is worth while, if that is known."""


class ClientError(SuperfluidError):
    """The request itself is at fault."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class InvalidValue(ClientError):
    """A field is missing, has the wrong type or is out of range; ``param`` names it."""

    code = "invalid_value"


class UnsupportedParameter(ClientError):
    """A known field that this server, or this model, cannot honour."""

    code = "unsupported_parameter"


class ContextLengthExceeded(ClientError):
    """The prompt does not fit the context window."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, limit: int, *, param: str | None = None) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens but the context window holds {limit}; "
            f"shorten the prompt by at least {prompt_tokens - limit} tokens or serve the model with a larger "
            f"--max-context",
            param=param,
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class UnknownModel(ClientError):
    """No such model is served; the message names those that are."""

    status = 404
    code = "model_not_found"

    def __init__(self, name: str, served: list[str]) -> None:
        super().__init__(f"model {name!r} is not served here; served: {', '.join(served)}", param="model")


class UnknownRequest(ClientError):
    """No queued or running request has this id."""

    status = 404
    code = "request_not_found"


class PayloadTooLarge(ClientError):
    """The body is over the size limit."""

    status = 413
    code = "payload_too_large"


class PermissionDenied(ClientError):
    """The peer may not do this."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class ServiceError(SuperfluidError):
    """The service cannot serve the request now."""

    status = 503
    code = "unavailable"


class ModelLoading(ServiceError):
    """The model is still being loaded, or its worker is being replaced."""

    code = "model_loading"


class Draining(ServiceError):
    """The daemon takes no new work: it is draining or shutting down."""

    code = "draining"


class ModelFailed(ServiceError):
    """The model cannot be loaded, or its worker died too often without a good tick; until somebody loads it again."""

    code = "model_failed"


class ModelUnloaded(ServiceError):
    """An operator has unloaded the model, or is about to."""

    code = "model_unloaded"


class EngineFault(ServiceError):
    """The engine failed this one request; others go on."""

    status = 500
    code = "engine_fault"


class StartupError(SuperfluidError):
    """The daemon cannot start. ``exit_code`` follows the man page."""

    exit_code: ClassVar[int] = 1
    code = "startup_error"


class AlreadyRunning(StartupError):
    """Another daemon, or another program, holds the address or the control socket."""

    code = "already_running"


class UsageError(StartupError):
    """A flag, an environment variable or a configuration file is wrong."""

    exit_code = 2
    code = "usage_error"


class ModelFileError(StartupError):
    """The model cannot be served: no such file, not a GGUF, truncated, too large, failed to load."""

    exit_code = 3
    code = "model_file_error"
