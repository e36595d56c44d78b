// Run AI SDK: both providers (openai, openai-compatible) with text, streams, tool loops and objects.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, jsonSchema, Output, streamText, tool } from "ai";

const server = { baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY };
const openai = createOpenAI(server);
const compatible = createOpenAICompatible({
  name: "sidestream",
  includeUsage: true,
  supportsStructuredOutputs: true,
  ...server,
});
const models = [
  // the provider's default: it refers to items of earlier answers, which the server stores
  ["responses", openai("demo_model"), {}],
  ["responses without store", openai("demo_model"), { openai: { store: false } }], // it sends these items
  ["chat", openai.chat("demo_model"), {}],
  ["compatible", compatible("demo_model"), {}],
];
const prompt = "What is the capital of France?";
const city = jsonSchema({
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
});
const weather = tool({
  description: "Return the weather of a city.",
  inputSchema: city,
  execute: async ({ city }) => ({ city, weather: "sunny" }),
});

for (const [name, model, providerOptions] of models) {
  const ask = { prompt, temperature: 0, maxOutputTokens: 200, providerOptions };
  const answer = await generateText({ model, ...ask, instructions: "Be brief." });
  assert.match(answer.text, /Paris/, name);
  assert.ok(answer.usage.outputTokens > 0, name);

  const stream = streamText({ model, ...ask });
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, answer.text, name);
  assert.ok((await stream.usage).inputTokens > 0, name);

  // the first step must call the tool, the second one answers; the same streamed
  const loop = {
    model,
    ...ask,
    tools: { weather },
    stopWhen: isStepCount(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  };
  const called = await generateText(loop);
  assert.equal(called.steps[0].toolResults[0].output.weather, "sunny", name);
  assert.match(called.text, /Paris/, name);
  const streamed = streamText(loop);
  assert.match(await streamed.text, /Paris/, name);
  assert.equal((await streamed.steps)[0].toolCalls[0].toolName, "weather", name);

  // a second question of the conversation: the first one's messages are sent back
  const history = [{ role: "user", content: prompt }, ...called.response.messages];
  const messages = [...history, { role: "user", content: "What is the capital of Italy?" }];
  assert.match((await generateText({ model, messages, temperature: 0, providerOptions })).text, /Rome/, name);

  const object = await generateText({ model, ...ask, output: Output.object({ schema: city }) });
  assert.ok(["Paris", "Rome"].includes(object.output.city), name);
}

const completion = await generateText({ model: compatible.completionModel("pirate"), prompt, maxOutputTokens: 16 });
assert.ok(completion.text.length > 0);
