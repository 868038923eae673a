// llama.cpp's turns, through node-llama-cpp's prebuilt binary: one sequence for each request, in one context.
//
//     node llama_cpp_driver.mjs MODEL.gguf THREADS     with node-llama-cpp in NODE_DIRECTORY/node_modules
//
// It says what turns.py says. What llama.cpp prints goes to the error stream.
import {createRequire} from "node:module";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [modelPath, threads] = [process.argv[2], Number(process.argv[3])];
const resolve = createRequire(process.env.NODE_DIRECTORY + "/").resolve;
const {getLlama, getModuleVersion, LlamaLogLevel} = await import(pathToFileURL(resolve("node-llama-cpp")));
const llama = await getLlama({gpu: false, logLevel: LlamaLogLevel.error, build: "never", maxThreads: threads});
const model = await llama.loadModel({modelPath});
const say = (answer) => process.stdout.write(JSON.stringify(answer) + "\n");

async function withContext(sequences, contextSize, work) {
  const context = await model.createContext({contextSize, sequences, batchSize: 2048, threads});
  const result = await work(context);
  await context.dispose();
  return result;
}

async function generate(prompts, numOutput) {
  const longest = Math.max(...prompts.map((prompt) => prompt.length)) + numOutput;
  return await withContext(prompts.length, Math.max(256, longest), async (context) => {
    const sequences = prompts.map(() => context.getSequence());
    const started = performance.now();
    await Promise.all(sequences.map(async (sequence, place) => {
      let count = 0;
      for await (const _ of sequence.evaluate(prompts[place], {temperature: 0, yieldEogToken: true})) {
        count += 1;
        if (count >= numOutput) break;
      }
      if (count !== numOutput) throw new Error(`${count} tokens instead of ${numOutput}`);
    }));
    return (performance.now() - started) / 1e3;
  });
}

async function nats(tokenIds, window) {
  return await withContext(1, window + 1, async (context) => {
    const sequence = context.getSequence();
    let total = 0, count = 0;
    for (let start = 0; start < tokenIds.length - 1; start += window) {
      const part = tokenIds.slice(start, start + window + 1);
      await sequence.clearHistory();
      const asked = part.slice(0, -1).map((token) => [token, {generateNext: {probabilities: true}}]);
      const found = await sequence.controlledEvaluate(asked);
      for (let place = 0; place < asked.length; place += 1) {
        total -= Math.log(found[place].next.probabilities.get(part[place + 1]));
        count += 1;
      }
    }
    return {nats_per_token: total / count, tokens: count};
  });
}

await generate([Array.from({length: 16}, (_, place) => place + 10)], 1);
say({version: `node-llama-cpp ${await getModuleVersion()}, llama.cpp ${llama.llamaCppRelease.release}`});
for await (const line of createInterface({input: process.stdin})) {
  const ask = JSON.parse(line);
  if ("window" in ask) say(await nats(ask.token_ids, ask.window));
  else say({seconds: await generate(ask.prompts, ask.num_output)});
}
process.exit(0);
