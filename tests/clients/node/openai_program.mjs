// Node `openai`: chat, a stream with usage, a forced call, responses, embeddings, an unknown model.
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.KVMESH_URL}/v1`, apiKey: process.env.KVMESH_KEY });
const messages = [{ role: "user", content: "hello there" }];
const said = await client.chat.completions.create({ model: "script", messages });
assert.equal(said.choices[0].message.content, "hello there");

let text = "";
let usage = null;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ model: "script", messages, ...options })) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, "hello there");
assert.equal(usage.completion_tokens, said.usage.completion_tokens);

const parameters = { type: "object", properties: { on: { type: "boolean" } }, required: ["on"] };
const tools = [{ type: "function", function: { name: "lamp", parameters: { ...parameters, additionalProperties: false }, strict: true } }];
const called = await client.chat.completions.create({ model: "tiny", messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 300 });
const [call] = called.choices[0].message.tool_calls;
assert.equal(typeof JSON.parse(call.function.arguments).on, "boolean");

const response = await client.responses.create({ model: "script", input: "hello there" });
assert.equal(response.output_text, "hello there");
assert.equal((await client.responses.retrieve(response.id)).output_text, "hello there");
const stream = client.responses.stream({ model: "script", input: "hello there" });
assert.equal((await stream.finalResponse()).output_text, "hello there");

const vectors = await client.embeddings.create({ model: "vectors", input: ["hello", "you"] });
assert.equal(vectors.data.length, 2);
assert.ok((await client.models.list()).data.length > 1);
await assert.rejects(client.chat.completions.create({ model: "nowhere", messages }), OpenAI.NotFoundError);
