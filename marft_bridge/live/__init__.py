"""Live traffic of an app, shared out between two teams of adapter versions, and recorded.

    request -> who it belongs to (sticky) -> base or candidate (split) -> the engine -> answer, and a chat span (calls)
                                                   +-> the same request to the candidate in the shadow (mirror)

Invariant: whoever one key belongs to sees one team, over restarts too; what is recorded or mirrored never changes or
delays an answer. How teams were trained, and which is better, is not known here.
"""
