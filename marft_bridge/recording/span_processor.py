"""Recording options -> the span processor that applies them: what is redacted, written and exported.

Invariant: a fault in the options is raised before the first span, never while the app runs.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.config.record import RecordOptions
from marft_bridge.recording.journal_exporter import JournalProcessor
from marft_bridge.recording.redaction import Redact, Redactor
from marft_bridge.recording.span_privacy import SpanPrivacy
from trace_store.journal import Journal

if TYPE_CHECKING:
    from marft_bridge.recording.otlp_export import OtlpExport


def options_to_processor(journal: Journal, options: RecordOptions, redact: Redact | None = None) -> JournalProcessor:
    """A processor for one recorder.

    Spans that wait for export are sent when the processor is garbage-collected, at the latest when Python ends.

    Raises:
        ConfigError: two redaction functions are given, or the OTLP exporter or its headers are missing.
        GraphError: the redaction function does not import or is not a function.
    """
    privacy = options_to_privacy(options, redact)
    export = _options_to_export(options)
    if export is None:
        return JournalProcessor(journal, privacy, sync_delay_s=options.sync_delay_s)
    processor = JournalProcessor(journal, privacy, export, sync_delay_s=options.sync_delay_s)
    weakref.finalize(processor, export.shutdown)
    return processor


def options_to_privacy(options: RecordOptions, redact: Redact | None = None) -> SpanPrivacy:
    """The redaction that the options describe. Raises as `options_to_processor`."""
    return SpanPrivacy(Redactor(options.redact, _options_to_function(options, redact)), content=options.content)


def check_options(options: RecordOptions) -> None:
    """Raises what a recorder with these options would raise; for commands that start something slow first."""
    options_to_privacy(options)
    export = _options_to_export(options)
    if export is not None:
        export.shutdown()


def _options_to_export(options: RecordOptions) -> OtlpExport | None:
    if options.otlp_endpoint is None:
        return None
    from marft_bridge.recording.otlp_export import OtlpExport  # imported late: it needs an optional extra

    return OtlpExport(options.otlp_endpoint, options.otlp_headers_env)


def _options_to_function(options: RecordOptions, redact: Redact | None) -> Redact | None:
    if options.redact_with is None:
        return redact
    if redact is not None:
        raise ConfigError("two redaction functions: record.redact_with names one and another one is passed; leave one")
    from marft_bridge.common.import_name import load_name

    loaded_object = load_name(options.redact_with, "record.redact_with")
    if not callable(loaded_object):
        raise GraphError(
            f"record.redact_with: {options.redact_with!r} is a {type(loaded_object).__name__}, "
            "not a function (attribute name, text) -> text"
        )
    function: Redact = loaded_object
    return function
