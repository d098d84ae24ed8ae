"""Keeps the responses that clients asked to keep: one owner, on disk, by organisation, for a time.

    router ──rpc──▶ `service.py`   whose is it: the organisation of the router's capability
                    `shelf.py`     what there is: SQLite on a thread of its own, bounds and age
                    `holds.py`     who works on what, and who cancelled it

Nothing here knows models, tokens, or what a response says.
"""
