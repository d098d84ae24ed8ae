"""instructor: an answer of a type in its three modes: a forced tool, a strict schema, JSON."""

from __future__ import annotations

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class Ticket(BaseModel):
    # Otherwise a model without sense may go on with properties of its own.
    model_config = ConfigDict(extra="forbid")

    urgent: bool
    colour: Literal["red", "green"]


client = OpenAI(base_url=os.environ["KVMESH_URL"] + "/v1", api_key=os.environ["KVMESH_KEY"])
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    ticket = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="tiny",
        response_model=Ticket,
        max_retries=0,
        max_tokens=400,
        temperature=0,
        messages=[{"role": "user", "content": "The printer burns."}],
    )
    assert isinstance(ticket, Ticket), (mode, ticket)
