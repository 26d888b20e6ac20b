"""Recording options -> the span processor that obeys them: what is cleaned, written and exported.

Invariant: whatever is wrong with the options is one line before the first span, never a surprise while the app runs.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from marft_bridge.errors import ConfigError, GraphError
from marft_bridge.exporter import JournalProcessor
from marft_bridge.record_options import RecordOptions
from marft_bridge.redaction import Redact, Redactor
from marft_bridge.span_privacy import SpanPrivacy
from trace_store.journal import Journal

if TYPE_CHECKING:
    from marft_bridge.otlp_export import OtlpExport


def options_to_processor(journal: Journal, options: RecordOptions, redact: Redact | None = None) -> JournalProcessor:
    """A processor for one recorder.

    What waits to be exported is sent when the processor is given up, at the latest when the interpreter ends.

    Raises:
        ConfigError: two redaction functions are given, or the OTLP exporter or its headers are missing.
        GraphError: the redaction function does not import or is none.
    """
    privacy = options_to_privacy(options, redact)
    export = _options_to_export(options)
    if export is None:
        return JournalProcessor(journal, privacy)
    processor = JournalProcessor(journal, privacy, export)
    weakref.finalize(processor, export.shutdown)
    return processor


def options_to_privacy(options: RecordOptions, redact: Redact | None = None) -> SpanPrivacy:
    """What the options take out of a span. Raises as `options_to_processor`."""
    return SpanPrivacy(Redactor(options.redact, _function(options, redact)), content=options.content)


def check_options(options: RecordOptions) -> None:
    """Raises what a recorder with these options would raise, before anything slow is started for it."""
    options_to_privacy(options)
    export = _options_to_export(options)
    if export is not None:
        export.shutdown()


def _options_to_export(options: RecordOptions) -> OtlpExport | None:
    if options.otlp_endpoint is None:
        return None
    from marft_bridge.otlp_export import OtlpExport  # needs an extra that most do without

    return OtlpExport(options.otlp_endpoint, options.otlp_headers_env)


def _function(options: RecordOptions, redact: Redact | None) -> Redact | None:
    if options.redact_with is None:
        return redact
    if redact is not None:
        raise ConfigError("two redaction functions: record.redact_with names one and another one is passed; leave one")
    from marft_bridge.load_name import load_name

    found = load_name(options.redact_with, "record.redact_with")
    if not callable(found):
        raise GraphError(
            f"record.redact_with: {options.redact_with!r} is a {type(found).__name__}, "
            "not a function (attribute name, text) -> text"
        )
    function: Redact = found
    return function
