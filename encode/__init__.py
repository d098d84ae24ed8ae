"""The encode worker: texts in, one vector for each.

    router ──rpc──▶ `service.py`   whose call it is: the router's capability
                    `batches.py`   what waits is computed together, call by call in turn
                    `bert.py`      the model, in numpy
                    `safetensors.py`  its weights

It plans nothing ahead and holds no pages. Nothing here knows HTTP, tenants or torch.
"""
