// Vercel's AI SDK through @ai-sdk/openai-compatible: node ai_sdk.mjs BASE_URL MODEL
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embed, generateText, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, model] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "shuntyard",
  baseURL,
  apiKey: "unused",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const greedy = {
  model: provider(model),
  prompt: "Tell me about the sea in one sentence.",
  temperature: 0,
  maxOutputTokens: 20,
  maxRetries: 0,
};
const tools = {
  get_weather: tool({
    description: "The weather in a city",
    inputSchema: z.object({ city: z.enum(["Paris", "Oslo"]) }),
  }),
};

const whole = await generateText(greedy);
assert.ok(whole.text.length > 10);
assert.ok(whole.usage.inputTokens > 10);
assert.ok(whole.usage.outputTokens > 0);
assert.ok(["stop", "length"].includes(whole.finishReason));
console.log("chat");

const stream = streamText(greedy);
const pieces = [];
for await (const piece of stream.textStream) pieces.push(piece);
assert.ok(pieces.length > 1);
assert.equal(pieces.join(""), whole.text);
assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
assert.equal(await stream.finishReason, whole.finishReason);
console.log("stream");

const tooled = { ...greedy, maxOutputTokens: 100, tools, toolChoice: "required" };
const called = await generateText(tooled);
assert.equal(called.finishReason, "tool-calls");
assert.ok(called.toolCalls.length > 0);
for (const call of called.toolCalls) {
  assert.equal(call.toolName, "get_weather");
  assert.ok(["Paris", "Oslo"].includes(call.input.city));
}
const streamedCalls = await streamText(tooled).toolCalls;
assert.deepEqual(
  streamedCalls.map((call) => call.input),
  called.toolCalls.map((call) => call.input),
);
console.log("tools");

const described = await generateText({
  ...greedy,
  prompt: "Describe a cat.",
  maxOutputTokens: 80,
  output: Output.object({ schema: z.object({ kind: z.enum(["cat", "dog"]), tame: z.boolean() }) }),
});
assert.ok(["cat", "dog"].includes(described.output.kind));
console.log("structured output");

await assert.rejects(generateText({ ...greedy, temperature: 9 }), (error) => {
  assert.ok(APICallError.isInstance(error));
  assert.equal(error.statusCode, 400);
  assert.match(error.message, /temperature/);
  return true;
});
let streamError;
const failing = streamText({
  ...greedy,
  model: provider("nobody"),
  onError: ({ error }) => (streamError = error),
});
await failing.consumeStream({ onError: () => {} });
assert.equal(streamError.statusCode, 404);
assert.match(streamError.message, /nobody/);
console.log("errors");

const { embedding } = await embed({
  model: provider.embeddingModel("all-MiniLM-L6-v2"),
  value: "sea",
});
assert.equal(embedding.length, 384);
console.log("embeddings");
console.log("all passed");
