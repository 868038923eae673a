// Greedy tokens of llama.cpp, through node-llama-cpp in NODE_DIRECTORY/node_modules; keys and values in float32.
//
//     node llama_cpp.mjs MODEL.gguf NUM_OUTPUT     prompts of token ids come as JSON on the input, and answers go back so
import {createRequire} from "node:module";
import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";

const [modelPath, numOutput] = [process.argv[2], Number(process.argv[3])];
const resolve = createRequire(process.env.NODE_DIRECTORY + "/").resolve;
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(resolve("node-llama-cpp")));
const llama = await getLlama({gpu: false, logLevel: LlamaLogLevel.error, build: "never", maxThreads: 2});
const model = await llama.loadModel({modelPath});
const wide = {experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32", swaFullCache: true};
const answers = [];
for (const prompt of JSON.parse(readFileSync(0))) {
  const context = await model.createContext({contextSize: 256, sequences: 1, threads: 2, ...wide});
  const tokens = [];
  for await (const token of context.getSequence().evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
    if (tokens.push(token) >= numOutput) break;
  }
  answers.push(tokens);
  await context.dispose();
}
process.stdout.write(JSON.stringify(answers) + "\n");
process.exit(0);
