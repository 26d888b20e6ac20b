"""A chat model of a class that the app wrote -> the served model, with what that class does around its calls.

Apps put classes of their own in front of ChatOpenAI: they ask for JSON, strip thoughts from an answer, add a field to
the request. Invariant: a method of the app's runs only where it hands the call on (`super()`), so that the tokens are
those of the engine's answer; what it puts into a request is carried, decided by the route or refused as any field is
(`request_rules`). A method that does not run is named once for each node.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any, ClassVar

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI

from marft_bridge.model_calls.node_chat_model import NodeChat

# What ChatOpenAI calls to make a request and to read its answer.
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


def with_own_methods(model: BaseChatModel, stand_in: NodeChat, node: str) -> NodeChat:
    """`stand_in`, which answers for `model`, with the methods of that one's class around its own."""
    served_class, idle_methods, is_provider = _class_to_served(type(model))
    if idle_methods and (not is_provider or _wraps_model(model)):
        stand_in.warn_idle_methods(node, type(model).__name__, idle_methods)
    if served_class is None:
        return stand_in
    served = object.__new__(served_class)
    own_values = {name: value for name, value in vars(model).items() if name not in vars(stand_in)}
    own_private = model.__pydantic_private__ or {}
    for name, value in (
        ("__dict__", {**own_values, **vars(stand_in)}),
        ("__pydantic_extra__", model.__pydantic_extra__),
        ("__pydantic_fields_set__", set(stand_in.__pydantic_fields_set__)),
        ("__pydantic_private__", {**own_private, **(stand_in.__pydantic_private__ or {})}),
    ):
        object.__setattr__(served, name, value)
    return served


@functools.lru_cache(maxsize=_CACHED)
def _class_to_served(model_class: type[BaseChatModel]) -> tuple[type[NodeChat] | None, tuple[str, ...], bool]:
    """The class that answers for models of this one, where its methods can run; the methods that do not run; and
    whether the class is a provider itself, with none of LangChain's beneath it."""
    own_classes = list(itertools.takewhile(_is_of_app, model_class.__mro__))
    provider_class = model_class.__mro__[len(own_classes)]
    methods = [(name, vars(owner)[name]) for owner in own_classes for name in _ANSWERING if name in vars(owner)]
    if methods and provider_class is ChatOpenAI and all(_hands_on(method) for _, method in methods):
        return _make_served_class(model_class), (), False
    return None, tuple(dict.fromkeys(name for name, _ in methods)), _package_of(provider_class) == "langchain_core"


def _wraps_model(model: BaseChatModel) -> bool:
    """Whether a model has another one, which it asks."""
    return any(isinstance(value, BaseChatModel) for value in vars(model).values())


def _is_of_app(model_class: type) -> bool:
    """Whether a class is neither of a package of LangChain's, such as langchain_openai, nor one of ours."""
    package = _package_of(model_class)
    return not package.startswith("langchain") and package != "marft_bridge"


def _package_of(model_class: type) -> str:
    return model_class.__module__.partition(".")[0]


def _hands_on(method: Any) -> bool:
    """Whether a method calls the one beneath it."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code is not None and "super" in code.co_names


def _make_served_class(model_class: Any) -> type[NodeChat]:
    class Served(model_class, NodeChat):  # type: ignore[misc]  # the app's methods, then ours, then ChatOpenAI's
        routes_last: ClassVar[bool] = True

        def _get_request_payload(self, input_: Any, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
            return self.to_routed(super()._get_request_payload(input_, stop=stop, **kwargs))

    return Served
