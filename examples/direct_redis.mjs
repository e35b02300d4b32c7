// A service without the gateway: it submits a job to Redis, follows its channel, misses messages on purpose, takes them
// from the log, and may cancel. All that it relies on is docs/protocol.md. Node 20 or newer, in this folder:
//
//     ropeway protocol export contract             # scripts and names, once per release
//     npm ci
//     node direct_redis.mjs "What is a ropeway?" --redis unix://$HOME/.local/share/ropeway/redis/redis.sock
//
// That is the Redis of `make serve`, which listens on no port.
//
//     --redis URL        unix://PATH, redis:// or rediss://; redis://127.0.0.1:6379/0
//     --contract DIR     what `ropeway protocol export` wrote; contract
//     --pool NAME        unset: the first that is there
//     --max-tokens N     of the answer; 64
//     --seed N           unset: drawn
//     --temperature T    unset: the model's own; 0 takes the likeliest token
//     --miss-after N     stop listening behind frame N, until the job has gone on
//     --cut-after N      the same with the connection closed and opened again
//     --deaf-after N     hear nothing any more, and do not know it
//     --cancel-after N   cancel behind frame N
//
// The answer goes to standard output as it comes; in the end one line of JSON on standard error says what happened.
import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";
import { Template } from "@huggingface/jinja";
import { Tokenizer } from "@huggingface/tokenizers";
import { decode, encode } from "@msgpack/msgpack";
import { blake2b } from "@noble/hashes/blake2.js";
import { createClient, RESP_TYPES } from "@redis/client";

/** What this file was written for; another one may have other KEYS and ARGV. */
const CONTRACT = "1.0";
/** Answers of Redis that pass. */
const PASSING = /^(LOADING|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|OOM|MISCONF|NOREPLICAS|BUSY)\b/;
/** Tries to reach a Redis that has never answered; afterwards it is tried for ever. */
const FIRST_TRIES = 5;
const FIRST_LOOK_MS = 1000, LAST_LOOK_MS = 15_000, FRUITLESS = 5, PAGE = 1000;

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    redis: { type: "string", default: "redis://127.0.0.1:6379/0" },
    contract: { type: "string", default: "contract" },
    pool: { type: "string" },
    "max-tokens": { type: "string", default: "64" },
    seed: { type: "string" },
    temperature: { type: "string" },
    "miss-after": { type: "string" },
    "cut-after": { type: "string" },
    "deaf-after": { type: "string" },
    "cancel-after": { type: "string" },
  },
});

const contract = JSON.parse(readFileSync(join(options.contract, "protocol.json"), "utf8"));
if (contract.contract !== CONTRACT) {
  throw new Error(`the contract is ${contract.contract}, this file was written for ${CONTRACT}`);
}

/** The first 8 bytes of BLAKE2b as a number. */
function hash(text) {
  return Buffer.from(blake2b(Buffer.from(text), { dkLen: 8 })).readBigUInt64BE();
}

/** A key or channel by its name in the contract. */
function key(name, parts) {
  return contract.keys[name].replace(/<(\w+)>/g, (_, part) => parts[part]);
}

/** Try again for as long as what Redis answers passes. Every call of a script may be repeated. */
async function patiently(call) {
  for (let pause = 200; ; pause = Math.min(2 * pause, 5000)) {
    try {
      return await call();
    } catch (error) {
      const lost = ["ECONNREFUSED", "ECONNRESET", "EPIPE"].includes(error.code);
      if (!lost && !PASSING.test(error.message) && !/closed|disconnect/i.test(error.message)) throw error;
      await sleep(pause);
    }
  }
}

/** Call a script by its SHA-1; a server that does not know it gets the text, and keeps it. */
async function script(redis, name, keys, args) {
  const { sha1, file } = contract.scripts[name];
  const call = { keys, arguments: args };
  return patiently(async () => {
    try {
      return await redis.evalSha(sha1, call);
    } catch (error) {
      if (!error.message.startsWith("NOSCRIPT")) throw error;
      return redis.eval(readFileSync(join(options.contract, file), "utf8"), call);
    }
  });
}

/** A pool: its card, and its template and tokenizer, which workers leave in Redis. */
async function openPool(raw, name) {
  const card = await raw.hGet(key("card", { pool: name }), "card");
  const bundle = await raw.get(key("tokenizer", { pool: name }));
  if (!card || !bundle) throw new Error(`there is no pool ${name}`);
  const { v, lanes, max_model_len, sampling_defaults } = decode(card);
  if (v !== contract.wire_version) throw new Error(`pool ${name} speaks version ${v} of the wire`);
  const { tokenizer_json, chat_template, special_tokens } = decode(bundle);
  if (!chat_template) throw new Error(`pool ${name} has no chat template`);
  const tokenizer = new Tokenizer(JSON.parse(tokenizer_json), {});
  const encodeChat = (messages) => {
    const text = new Template(chat_template).render({ ...special_tokens, messages, add_generation_prompt: true });
    return tokenizer.encode(text, { add_special_tokens: false }).ids;
  };
  return { name, lanes, maxLength: max_model_len, defaults: sampling_defaults, encodeChat };
}

/** A job that is ready to be submitted: its id, its names, its envelope. */
function prepare(pool, ids, sampling, { tenant = "default", jobClass = "normal" } = {}) {
  if (ids.length + sampling.max_tokens > pool.maxLength) throw new Error("prompt and answer do not fit the context");
  const near = ids.length >= contract.affinity_tokens; // jobs that begin alike share a lane, and so a prefix cache
  const seen = `[${ids.slice(0, contract.affinity_tokens).join(", ")}]`;
  const lane = near ? Number(hash(seen) % BigInt(pool.lanes)) : randomBytes(1)[0] % pool.lanes;
  const unique = Date.now().toString(16).padStart(12, "0") + randomBytes(10).toString("hex");
  const parts = { pool: pool.name, lane, unique, tenant, class: jobClass };
  parts.bucket = Number(hash(tenant) % BigInt(contract.buckets));
  const id = `${pool.name}.${lane}.${unique}`;
  const head = { v: contract.wire_version, model: pool.name, kind: "chat" };
  const request = { prompt_token_ids: ids, sampling, job_class: jobClass };
  const envelope = { ...head, id, tenant, ...request, created_ms: Date.now() };
  return { id, parts, head, envelope, cost: ids.length + sampling.max_tokens, events: key("events", parts) };
}

/** Submit it. The same id again is the same job, so an answer that was lost costs nothing. */
async function submit(redis, job) {
  const { parts, envelope } = job;
  const { deadline, max_run, retention } = contract.lifetime_ms;
  const [code, jobs] = await script(
    redis, "submit",
    ["job", "queue", "stats", "delayed", "tenant_jobs", "expiring"].map((name) => key(name, parts)),
    [
      job.id, Buffer.from(encode(envelope)), parts.class, parts.bucket, job.cost, 1, envelope.prompt_token_ids.length,
      deadline, max_run, retention, 10_000, -1, 0, key("wake", parts), parts.lane, "", 0, envelope.tenant,
      Buffer.from(encode(job.head)), "",
    ].map((argument) => (Buffer.isBuffer(argument) ? argument : String(argument))),
  );
  if (code === 2) throw new Error(`the queue is full: ${jobs} jobs wait in lane ${parts.lane}`);
}

/** Ask for its end: of a queued job here and now, of a running one by its worker. Harmless to repeat. */
function cancel(redis, job) {
  const message = Buffer.from(encode({ op: "cancel", id: job.id }));
  const keys = ["job", "events", "stats", "outbox"].map((name) => key(name, job.parts));
  return script(redis, "cancel", keys, [job.id, key("control", job.parts), message]);
}

/** A job's frames in order, each once: from the channel as long as none is missing, from the log where one might be. */
class Follower {
  seq = 0;
  read = { channel: 0, log: 0 };
  #inbox = [];
  #look = false;
  #wake = () => {};

  constructor(redis, raw, subscriber, job) {
    Object.assign(this, { redis, raw, subscriber, job });
    subscriber.on("ready", () => this.look()); // behind a reconnect: nobody knows what was sent meanwhile
  }

  /** Resolves once Redis has confirmed the subscription: what is published from now on is heard. */
  async listen() {
    await this.subscriber.subscribe(this.job.events, this.#hear, true);
    this.look();
  }

  async unlisten() {
    await this.subscriber.unsubscribe(this.job.events, this.#hear, true);
  }

  #hear = (message) => {
    this.#inbox.push(message);
    this.#wake();
  };

  look() {
    this.#look = true;
    this.#wake();
  }

  async *frames() {
    for (let pause = FIRST_LOOK_MS, fruitless = 0; ; ) {
      for await (const [source, frame] of this.#next()) {
        [pause, fruitless] = [FIRST_LOOK_MS, 0];
        this.seq = frame.seq;
        this.read[source] += 1;
        yield frame;
        if (frame.kind === "done" || frame.kind === "error") return;
      }
      if (!(await this.#arrival(pause))) {
        pause = Math.min(2 * pause, LAST_LOOK_MS); // silence: pub/sub promises nothing, the job's hash knows
        const [status, last] = await patiently(() => this.redis.hmGet(key("job", this.job.parts), ["status", "seq"]));
        if (status === null) throw new Error("the job has expired");
        if (Number(last) > this.seq) this.look();
        else if (contract.final_statuses.includes(status)) fruitless += 1;
        if (fruitless === FRUITLESS) throw new Error("the last frame is missing");
      }
    }
  }

  async *#next() {
    while (this.#inbox.length) {
      const message = this.#inbox.shift();
      const frame = message.length ? decode(message) : null; // empty: the frame is large, and in the log alone
      if (frame && frame.seq <= this.seq) continue;
      if (frame && frame.seq === this.seq + 1) yield ["channel", frame];
      else this.#look = true;
    }
    while (this.#look) {
      this.#look = false;
      const page = await patiently(() => this.raw.xRange(this.job.events, `${this.seq + 1}-0`, "+", { COUNT: PAGE }));
      for (const { message } of page) {
        const frame = decode(message.f);
        if (frame.seq !== this.seq + 1) throw new Error("frames are missing");
        yield ["log", frame];
      }
      if (page.length === PAGE) this.#look = true;
    }
  }

  async #arrival(ms) {
    if (this.#inbox.length || this.#look) return true;
    let timer;
    const heard = new Promise((resolve) => {
      this.#wake = () => resolve(true);
      timer = setTimeout(() => resolve(false), ms);
    });
    const answer = await heard;
    clearTimeout(timer);
    this.#wake = () => {};
    return answer;
  }
}

/** Hear nothing for a while, as behind a bad network, until the job has gone on by some frames. */
async function goDeaf(follower, how) {
  const { redis, subscriber, job, seq } = follower;
  if (how === "cut-after") subscriber.destroy();
  else await follower.unlisten();
  if (how === "deaf-after") return;
  for (let last = 0, status = "running"; last < seq + 5 && status === "running"; await sleep(10)) {
    const [state, number] = await redis.hmGet(key("job", job.parts), ["status", "seq"]);
    [status, last] = [state, Number(number)];
  }
  if (how === "cut-after") await subscriber.connect();
  await follower.listen();
}

/** A client that comes back by itself once it was connected, and gives up soon where it never was. */
function open() {
  let reached = false;
  const reconnectStrategy = (tries) => reached || tries < FIRST_TRIES ? Math.min(200 * 2 ** tries, 5000) : new Error(
    "no Redis answers there. --redis names one; of `make serve`: --redis unix://$HOME/.local/share/ropeway/redis/redis.sock",
  );
  const client = createClient({ url: options.redis, socket: { reconnectStrategy } });
  client.on("ready", () => (reached = true));
  return client.on("error", (error) => console.error(`redis: ${error.message || error.code}`));
}

async function main() {
  const [redis, subscriber] = [open(), open()];
  try {
    for (const client of [redis, subscriber]) await client.connect();
  } catch (error) {
    console.error(error.message);
    process.exit(1);
  }
  const raw = redis.withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer }); // the same connection, with bytes as bytes
  try {
    const name = options.pool ?? (await redis.sMembers(contract.keys.pools)).sort()[0];
    const pool = await openPool(raw, name);
    const ids = pool.encodeChat([{ role: "user", content: positionals[0] ?? "What is a ropeway?" }]);
    const seed = options.seed === undefined ? randomBytes(4).readUInt32BE() : Number(options.seed);
    const sampling = { ...pool.defaults, max_tokens: Number(options["max-tokens"]), seed };
    if (options.temperature !== undefined) sampling.temperature = Number(options.temperature);
    const job = prepare(pool, ids, sampling);
    const follower = new Follower(redis, raw, subscriber, job);
    await follower.listen(); // first: then nothing of the job is missed
    await submit(redis, job);
    const planned = Object.keys(options).filter((name) => name.endsWith("-after"));
    let last, tokens = 0;
    for await (const frame of follower.frames()) {
      for (const choice of frame.choices ?? []) {
        process.stdout.write(choice.text ?? "");
        tokens += choice.ids?.length ?? 0;
      }
      last = frame;
      for (const what of planned.filter((each) => frame.seq === Number(options[each]))) {
        if (what === "cancel-after") await cancel(redis, job);
        else await goDeaf(follower, what);
      }
    }
    process.stdout.write("\n");
    const { status, usage, error } = last;
    console.error(JSON.stringify({ id: job.id, status, frames: last.seq, read: follower.read, tokens, usage, error }));
    process.exitCode = status === "completed" || (status === "cancelled" && options["cancel-after"]) ? 0 : 1;
  } finally {
    subscriber.destroy();
    await redis.close();
  }
}

await main();
