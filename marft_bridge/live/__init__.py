"""Live traffic of an app, split between two teams of adapter versions (an A/B test), and recorded.

    request -> its key and run (identity) -> base or candidate (split) -> the engine -> answer, and a chat span (calls)
                                                   +-> the same request to the candidate (mirror)

Invariant: all requests of one key are answered by one team, over restarts too; recording and mirroring never change or
delay an answer.
"""
