// The official JavaScript client: node openai.mjs BASE_URL MODEL
import assert from "node:assert/strict";
import OpenAI, { BadRequestError, NotFoundError } from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "Tell me about the sea in one sentence." }];
const greedy = { model, messages, temperature: 0, max_tokens: 20 };
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Paris", "Oslo"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

const whole = await client.chat.completions.create(greedy);
assert.equal(whole.choices[0].message.role, "assistant");
assert.ok(whole.choices[0].message.content.length > 10);
assert.ok(whole._request_id);
console.log("chat");

const chunks = [];
const stream = await client.chat.completions.create({
  ...greedy,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) chunks.push(chunk);
const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
assert.equal(text, whole.choices[0].message.content);
assert.deepEqual(chunks.at(-1).choices, []);
assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
console.log("stream");

const runner = client.chat.completions.stream(greedy);
let gathered = "";
runner.on("content", (delta) => (gathered += delta));
const final = await runner.finalChatCompletion();
assert.equal(gathered, whole.choices[0].message.content);
assert.equal(final.choices[0].message.content, gathered);
console.log("stream helper");

const tooled = { ...greedy, max_tokens: 100, tools: [tool], tool_choice: "required" };
const called = await client.chat.completions.create({ ...tooled, parallel_tool_calls: false });
assert.equal(called.choices[0].finish_reason, "tool_calls");
const calls = called.choices[0].message.tool_calls;
assert.equal(calls.length, 1);
assert.equal(calls[0].function.name, "get_weather");
assert.ok(["Paris", "Oslo"].includes(JSON.parse(calls[0].function.arguments).city));
const streamed = await client.chat.completions
  .stream({ ...tooled, parallel_tool_calls: false })
  .finalChatCompletion();
assert.equal(streamed.choices[0].finish_reason, "tool_calls");
assert.deepEqual(
  streamed.choices[0].message.tool_calls.map((call) => [call.type, call.function.arguments]),
  calls.map((call) => [call.type, call.function.arguments]),
);
console.log("tools");

await assert.rejects(
  client.chat.completions.create({ ...greedy, temperature: 9 }),
  (error) =>
    error instanceof BadRequestError &&
    error.param === "temperature" &&
    error.status === 400 &&
    Boolean(error.requestID),
);
await assert.rejects(
  client.chat.completions.create({ ...greedy, model: "nobody", stream: true }),
  (error) => error instanceof NotFoundError && error.code === "model_not_found",
);
console.log("errors");

const endless = await client.chat.completions.create({
  ...greedy,
  max_tokens: 1500,
  ignore_eos: true,
  stream: true,
});
let seen = 0;
for await (const _ of endless) if (++seen === 5) break;
const root = baseURL.replace(/\/v1$/, "");
const deadline = Date.now() + 1000;
let load = -1;
while (load !== 0 && Date.now() < deadline) {
  load = (await (await fetch(`${root}/load`)).json()).server_load;
}
assert.equal(load, 0, "a stream that the client left still runs");
console.log("abort");

const ids = [];
for await (const entry of client.models.list()) ids.push(entry.id);
assert.equal(ids[0], model);
assert.equal((await client.models.retrieve("org/name")).id, "org/name");
const embedding = await client.embeddings.create({ model: "all-MiniLM-L6-v2", input: "sea" });
assert.equal(embedding.data[0].embedding.length, 384);
assert.ok(Math.abs(Math.hypot(...embedding.data[0].embedding) - 1) < 1e-3);
const completion = await client.completions.create({
  model,
  prompt: "The capital of France is",
  temperature: 0,
  max_tokens: 4,
});
assert.match(completion.choices[0].text, /Paris/);
console.log("models, embeddings, completions");
console.log("all passed");
