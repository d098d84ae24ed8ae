// `ai` with `@ai-sdk/openai-compatible`: text, a stream, an object of a schema, a forced call, an embedding.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const mesh = createOpenAICompatible({
  name: "kvmesh",
  baseURL: `${process.env.KVMESH_URL}/v1`,
  apiKey: process.env.KVMESH_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const said = await generateText({ model: mesh("script"), prompt: "hello there" });
assert.equal(said.text, "hello there");

const streamed = streamText({ model: mesh("script"), prompt: "hello there" });
let text = "";
for await (const part of streamed.textStream) text += part;
assert.equal(text, "hello there");
assert.equal((await streamed.usage).outputTokens, said.usage.outputTokens);

const shape = z.object({ on: z.boolean(), colour: z.enum(["red", "green"]) });
const made = await generateObject({ model: mesh("tiny"), schema: shape, prompt: "x", maxOutputTokens: 300, maxRetries: 0 });
shape.parse(made.object);

const lamp = tool({ description: "Switches a lamp.", inputSchema: z.object({ on: z.boolean() }) });
const called = await generateText({ model: mesh("tiny"), prompt: "x", tools: { lamp }, toolChoice: "required", maxOutputTokens: 300 });
assert.equal(called.toolCalls[0].toolName, "lamp");
assert.equal(typeof called.toolCalls[0].input.on, "boolean");

const { embedding } = await embed({ model: mesh.embeddingModel("vectors"), value: "hello" });
assert.ok(embedding.length > 1);
