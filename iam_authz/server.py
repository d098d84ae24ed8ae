"""The IAM service: `python -m iam_authz.server --config FILE`."""

from __future__ import annotations

from iam_authz.iam import ALLOWED, SERVICES, open_iam
from iam_authz.options import parse_options
from iam_authz.pepper import PepperError
from iam_authz.schema import SchemaError
from mesh.config import ConfigError
from mesh.service import STOP_GRACE_S, ServiceRuntime, main


async def serve(runtime: ServiceRuntime) -> None:
    """Runs until the runtime is told to stop."""
    config = runtime.config
    options = parse_options(config.options)
    try:
        async with open_iam(
            config.state_dir, options, runtime.identity, metrics=runtime.registry, news=runtime.nats
        ) as iam:
            server = runtime.serve(ALLOWED)
            iam.add_to(server.server)
            await server.start(SERVICES)
            runtime.ready()
            runtime.announce()
            await runtime.stopping.wait()
            # Routers turn to another IAM at once; running calls end before the database closes.
            iam.directory.close()
            await server.stop(STOP_GRACE_S)
    except (PepperError, SchemaError) as error:
        raise ConfigError(str(error)) from error


if __name__ == "__main__":
    main(serve)
