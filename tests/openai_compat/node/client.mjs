// The `openai` package for Node against the whole system. Prints one line per check, `ok <name>` or `failed <name>: why`.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });
const TEXT = "the cable of a ropeway never stops";
const messages = [{ role: "user", content: TEXT }];

const checks = {
  async chat() {
    const { data, response } = await client.chat.completions
      .create({
        model, messages, n: 2, seed: 1, max_completion_tokens: 64, logprobs: true, top_logprobs: 1, user: "u",
        safety_identifier: "s", prompt_cache_key: "k", metadata: { a: "b" }, store: false, service_tier: "priority",
      })
      .withResponse();
    assert.ok(data.id.includes(response.headers.get("x-ropeway-job-id")));
    assert.deepEqual(data.choices.map((choice) => choice.message.content), [TEXT, TEXT]);
    assert.equal(data.service_tier, "priority");
    assert.ok(data.choices[0].logprobs.content.length > 1);
    assert.equal(data.usage.total_tokens, data.usage.prompt_tokens + data.usage.completion_tokens);
  },
  async chat_stream() {
    const stream = await client.chat.completions.create({
      model, messages, stream: true, stream_options: { include_usage: true }, max_tokens: 64,
    });
    let text = "", usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, TEXT);
    assert.ok(usage.completion_tokens > 1);
  },
  async chat_stream_helper() {
    const stream = client.chat.completions.stream({ model, messages, max_tokens: 64 });
    assert.equal(await stream.finalContent(), TEXT);
  },
  async chat_stream_left_early() {
    const stream = await client.chat.completions.create({ model, messages, stream: true, max_tokens: 64 });
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: [TEXT, "x y"], max_tokens: 64, logprobs: 1 });
    assert.deepEqual(answer.choices.map((choice) => choice.text), [TEXT, "x y"]);
    let text = "";
    for await (const chunk of await client.completions.create({ model, prompt: TEXT, max_tokens: 64, stream: true })) {
      text += chunk.choices[0].text;
    }
    assert.equal(text, TEXT);
  },
  async models() {
    const ids = [];
    for await (const found of client.models.list()) ids.push(found.id);
    assert.deepEqual(ids, [model]);
    assert.equal((await client.models.retrieve(model)).object, "model");
  },
  async responses() {
    const answer = await client.responses.create({ model, input: TEXT, max_output_tokens: 64, metadata: { a: "b" } });
    assert.equal(answer.output_text, TEXT);
    assert.equal(answer.status, "completed");
    assert.equal((await client.responses.retrieve(answer.id)).output_text, TEXT);
    const next = await client.responses.create({ model, input: "!", previous_response_id: answer.id });
    assert.equal(next.output_text, `${TEXT}${TEXT}!`);
    const items = [];
    for await (const item of client.responses.inputItems.list(answer.id)) items.push(item);
    assert.equal(items[0].content[0].text, TEXT);
    await client.responses.delete(answer.id);
    await assert.rejects(client.responses.retrieve(answer.id), OpenAI.NotFoundError);
  },
  async responses_stream_taken_up() {
    const stream = await client.responses.create({ model, input: TEXT, background: true, stream: true });
    const seen = [];
    for await (const event of stream) {
      seen.push(event);
      if (event.type === "response.output_text.delta") break;
    }
    const id = seen[0].response.id;
    const rest = await client.responses.retrieve(id, { stream: true, starting_after: seen.at(-1).sequence_number });
    for await (const event of rest) seen.push(event);
    assert.deepEqual(seen.map((event) => event.sequence_number), [...seen.keys()]);
    const deltas = seen.filter((event) => event.type === "response.output_text.delta");
    assert.equal(deltas.map((event) => event.delta).join(""), TEXT);
    assert.equal(seen.at(-1).type, "response.completed");
    assert.equal((await client.responses.cancel(id)).status, "completed");
  },
  async responses_stream_helper() {
    const final = await client.responses.stream({ model, input: TEXT }).finalResponse();
    assert.equal(final.output_text, TEXT);
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ model: "other", messages }), (error) => {
      assert.ok(error instanceof OpenAI.NotFoundError);
      assert.equal(error.code, "model_not_found");
      return true;
    });
    await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
    const tools = [{ type: "function", function: { name: "f", parameters: {} } }];
    await assert.rejects(client.chat.completions.create({ model, messages, tools }), /tools/);
    await assert.rejects(client.responses.create({ model, input: "x", tools: [{ type: "web_search" }] }), /tools/);
    const stranger = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`failed ${name}: ${error.stack}`);
  }
}
process.exit(failed ? 1 : 0);
