// Node's clients on their own defaults: the SDKs of OpenAI, Anthropic and Ollama, and Vercel's AI SDK over three APIs.
//
//   mkdir /tmp/clients && cd /tmp/clients && cp .../tools/clients.mjs . && npm install openai @anthropic-ai/sdk ollama ai zod \
//     @ai-sdk/openai-compatible @ai-sdk/anthropic @ai-sdk/openai
//   penstock serve MODEL --any-model-name & node clients.mjs http://127.0.0.1:8000 [vercel]
//
// Each line says what a client made of the answer, or its error; nothing but shapes is judged. What came of it:
// docs/guides/clients.md.
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";
import { Ollama } from "ollama";
import { generateText, streamText, generateObject, tool, stepCountIs, embedMany, Output } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { z } from "zod";
const url = process.argv[2];
const model = (await (await fetch(url + "/v1/models")).json()).data[0].id;
const QUESTION = "What is the weather in Paris? Use the tool.";
const weather = { type: "function", function: { name: "weather", description: "The weather in a city.", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } };
const openai = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const ollama = new Ollama({ host: url });
const compat = createOpenAICompatible({ name: "penstock", baseURL: url + "/v1", apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
const aAnthropic = createAnthropic({ baseURL: url + "/v1", apiKey: "none" });
const aOpenAI = createOpenAI({ baseURL: url + "/v1", apiKey: "none" });
const tools = { weather: tool({ description: "The weather in a city.", inputSchema: z.object({ city: z.string() }), execute: async ({ city }) => `Sunny in ${city}, 21 degrees.` }) };
const person = z.object({ name: z.string(), age: z.number() });
async function agent(m, more = {}) { const r = await generateText({ model: m, tools, stopWhen: stepCountIs(3), prompt: QUESTION, maxOutputTokens: 80, ...more }); return [r.steps.length, r.steps[0].toolCalls.map(c => c.input), r.text.slice(0, 60), r.finishReason]; }
async function streamed(m) { const r = streamText({ model: m, prompt: "Count to five.", maxOutputTokens: 40 }); let s = "", n = 0; for await (const c of r.textStream) { s += c; n++; } return [n, s.slice(0, 40), await r.finishReason, (await r.usage).outputTokens]; }
const cases = {
  openai_chat: async () => (await openai.chat.completions.create({ model, messages: [{ role: "user", content: "Say hi." }], max_tokens: 20 })).choices[0].message.content,
  openai_stream_helper: async () => { const s = openai.chat.completions.stream({ model, messages: [{ role: "user", content: QUESTION }], tools: [weather], stream_options: { include_usage: true } }); const r = await s.finalChatCompletion(); return [r.choices[0].finish_reason, r.choices[0].message.tool_calls?.map(c => c.function.arguments), r.usage.total_tokens]; },
  openai_runTools: async () => { const r = openai.chat.completions.runTools({ model, messages: [{ role: "user", content: QUESTION }], max_tokens: 80, tools: [{ type: "function", function: { ...weather.function, parse: JSON.parse, function: async ({ city }) => `Sunny in ${city}` } }] }, { maxChatCompletions: 3 }); return [await r.finalContent().catch(e => String(e)), r.messages.length]; },
  openai_responses: async () => { const r = await openai.responses.create({ model, input: "Say hi.", max_output_tokens: 20 }); return [r.status, r.output_text]; },
  openai_embeddings: async () => (await openai.embeddings.create({ model, input: ["a", "b"] })).data.map(d => d.embedding.length),
  openai_error: async () => { try { await openai.chat.completions.create({ model, messages: [{ role: "user", content: "x" }], temperature: -1 }); } catch (e) { return [e.constructor.name, e.message]; } },
  anthropic_message: async () => { const r = await anthropic.messages.create({ model, max_tokens: 20, messages: [{ role: "user", content: "Say hi." }] }); return [r.stop_reason, r.content[0].text]; },
  anthropic_stream: async () => { const s = anthropic.messages.stream({ model, max_tokens: 80, messages: [{ role: "user", content: QUESTION }], tools: [{ name: "weather", description: "The weather in a city.", input_schema: weather.function.parameters }] }); const r = await s.finalMessage(); return [r.stop_reason, r.content.map(b => b.type), r.usage.output_tokens]; },
  anthropic_count: async () => (await anthropic.messages.countTokens({ model, messages: [{ role: "user", content: "Say hi." }] })).input_tokens,
  ollama_chat: async () => (await ollama.chat({ model, messages: [{ role: "user", content: "Say hi." }], options: { num_predict: 20 } })).message.content,
  ollama_stream_tools: async () => { let n = 0, calls; for await (const c of await ollama.chat({ model, messages: [{ role: "user", content: QUESTION }], tools: [weather], stream: true })) { n++; calls = c.message.tool_calls ?? calls; } return [n, calls?.map(c => c.function)]; },
  ollama_list: async () => (await ollama.list()).models.length,
  vercel_compatible_text: async () => streamed(compat(model)),
  vercel_compatible_agent: async () => agent(compat(model)),
  vercel_compatible_object: async () => (await generateObject({ model: compat(model), schema: person, prompt: "Anna Berger is 34 years old." })).object,
  vercel_compatible_output: async () => (await generateText({ model: compat(model), output: Output.object({ schema: person }), prompt: "Anna Berger is 34 years old." })).output,
  vercel_compatible_embed: async () => (await embedMany({ model: compat.textEmbeddingModel ? compat.textEmbeddingModel(model) : compat.embeddingModel(model), values: ["a", "b"] })).embeddings.map(e => e.length),
  vercel_anthropic_text: async () => streamed(aAnthropic(model)),
  vercel_anthropic_agent: async () => agent(aAnthropic(model)),
  vercel_anthropic_object: async () => (await generateObject({ model: aAnthropic(model), schema: person, prompt: "Anna Berger is 34 years old." })).object,
  vercel_responses_text: async () => streamed(aOpenAI(model)),
  vercel_responses_agent: async () => agent(aOpenAI(model)),
  vercel_responses_object: async () => (await generateObject({ model: aOpenAI(model), schema: person, prompt: "Anna Berger is 34 years old." })).object,
  vercel_anthropic_agent_named: async () => agent(aAnthropic("claude-sonnet-4-5")),
  vercel_responses_agent_named: async () => agent(aOpenAI("gpt-5")),
};
let failed = 0;
for (const [name, f] of Object.entries(cases)) {
  if (process.argv[3] && !name.includes(process.argv[3])) continue;
  try { console.log(name.padEnd(30), JSON.stringify(await f())); } catch (e) { failed++; console.log(name.padEnd(30), "FAILED", e.constructor.name, String(e.message).slice(0, 300)); }
}
process.exit(failed);
