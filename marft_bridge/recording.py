"""Recording options -> the span processor that obeys them: what is cleaned, written and exported.

Invariant: whatever is wrong with the options is one line before the first span, never a surprise while the app runs.
"""

from __future__ import annotations

import weakref

from marft_bridge.errors import ConfigError, GraphError
from marft_bridge.exporter import JournalProcessor
from marft_bridge.record_options import RecordOptions
from marft_bridge.redaction import Redact, Redactor
from marft_bridge.span_privacy import SpanPrivacy
from trace_store.journal import Journal


def options_to_processor(journal: Journal, options: RecordOptions, redact: Redact | None = None) -> JournalProcessor:
    """A processor for one recorder.

    What waits to be exported is sent when the processor is given up, at the latest when the interpreter ends.

    Raises:
        ConfigError: two redaction functions are given, or the OTLP exporter or its headers are missing.
        GraphError: the redaction function does not import or is none.
    """
    privacy = SpanPrivacy(Redactor(options.redact, _function(options, redact)), content=options.content)
    if options.otlp_endpoint is None:
        return JournalProcessor(journal, privacy)
    from marft_bridge.otlp_export import OtlpExport  # needs an extra that most do without

    export = OtlpExport(options.otlp_endpoint, options.otlp_headers_env)
    processor = JournalProcessor(journal, privacy, export)
    weakref.finalize(processor, export.shutdown)
    return processor


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
