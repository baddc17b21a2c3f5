"""Errors a user can act on: one sentence that says what is wrong and what to do."""


class ProoflensError(Exception):
    """Base of every error that prooflens raises on purpose; the command line prints it and exits with 1."""


class ModelError(ProoflensError):
    """A model cannot be read, is broken, or has an architecture that prooflens does not know."""


class PromptError(ProoflensError):
    """A text cannot be turned into an input of the model."""


class RegionError(ProoflensError):
    """An input set is not well formed."""


class SetError(ProoflensError):
    """A set of `prooflens.sets` is not well formed, or an operation does not apply to it."""


class QueryError(ProoflensError):
    """A query cannot be parsed, or does not fit the model and prompt it is asked of."""


class EmptyPolytopeError(QueryError):
    """Weight bounds contradict the simplex: no attention pattern satisfies them."""


class EngineError(ProoflensError):
    """An engine cannot answer: unknown name, unsupported site, or not enough memory."""


class RunError(ProoflensError):
    """A run directory cannot be written, is not one, or is damaged."""
