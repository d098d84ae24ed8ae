"""Who somebody is, and what an organisation may do.

    credential (API key or JWT)
      → `authenticate.py`   which organisation, principal and credential is this?
      → `identity.py`       a signed identity token for the router, 60 s at most
    operator's change
      → `registry.py`       validated, written and audited in one transaction
      → `directory.py`      in memory at once, pushed to every router

`service/` holds the gRPC faces, `server.py` starts them. The package knows
organisations, keys, tokens, grants, the model catalogue and metered usage. It
never sees a prompt, and it does not decide what a request may do with a model:
the router does, against the policy described in `directory.py`.
"""
