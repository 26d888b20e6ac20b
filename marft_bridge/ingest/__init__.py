"""Traces that somebody else recorded -> episodes of the store, as far as they go.

    files, POST /v1/traces -> otlp -> WireSpan -> dialects -> Reading -> spans_to_rows -> SpanRow -> Journal -> store

Invariant: nothing is made up. What a dialect does not say (token ids, log-probs, which write fired which node) is
absent from the rows, given as the reason why an action cannot be trained on, and counted in the report.
"""
