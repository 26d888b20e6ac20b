"""A chat model of a class that the app wrote -> a warning of what does not run of that class.

Apps put classes of their own in front of ChatOpenAI or another provider's. Invariant: no method of such a class runs
around the served model, because nothing makes sure that its answer is the engine's, made of the recorded prompt: it may
have a cache, ask twice, or change messages. A method that does not run is named once for each node.
"""

from __future__ import annotations

import functools
import itertools

from langchain_core.language_models import BaseChatModel

from marft_bridge.model_calls.node_chat_model import NodeChat

# What a provider's class calls to make a request and to read its answer.
_ANSWERING = (
    "_generate",
    "_agenerate",
    "_stream",
    "_astream",
    "_get_request_payload",
    "_create_chat_result",
    "_convert_chunk_to_generation_chunk",
)
_CACHED = 64  # an app may define its class inside a function, anew for each call


def warn_of_own_methods(model: BaseChatModel, chat: NodeChat, node: str) -> None:
    """Warns of the methods of the model's class that do not run where `chat` answers for it."""
    idle_methods, is_provider = _class_to_idle(type(model))
    if idle_methods and (not is_provider or _wraps_model(model)):
        chat.warn_idle_methods(node, type(model).__name__, idle_methods)


@functools.lru_cache(maxsize=_CACHED)
def _class_to_idle(model_class: type[BaseChatModel]) -> tuple[tuple[str, ...], bool]:
    """The methods that do not run; and whether the class is a provider itself, with none of LangChain's beneath it."""
    own_classes = list(itertools.takewhile(_is_of_app, model_class.__mro__))
    provider_class = model_class.__mro__[len(own_classes)]
    methods = [name for owner in own_classes for name in _ANSWERING if name in vars(owner)]
    return tuple(dict.fromkeys(methods)), _package_of(provider_class) == "langchain_core"


def _wraps_model(model: BaseChatModel) -> bool:
    """Whether a model has another one, which it asks."""
    return any(isinstance(value, BaseChatModel) for value in vars(model).values())


def _is_of_app(model_class: type) -> bool:
    """Whether a class is neither of a package of LangChain's, such as langchain_openai, nor one of ours."""
    package = _package_of(model_class)
    return not package.startswith("langchain") and package != "marft_bridge"


def _package_of(model_class: type) -> str:
    return model_class.__module__.partition(".")[0]
