"""Traces recorded by other tracers -> episodes of the store.

    files, POST /v1/traces -> otlp -> WireSpan -> conventions -> Reading -> spans_to_rows -> SpanRow -> Journal -> store
    Langfuse's exports -> langfuse_export -> WireSpan, and scores -> rewards of the store

Invariant: nothing is made up. What a tracer's semantic convention does not record (token ids, log-probs, which write
triggered which node) is absent from the rows, is the reason why an action cannot be trained on, and is counted in the
report.
"""
