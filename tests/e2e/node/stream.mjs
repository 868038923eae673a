// Streams one answer from a Headway server, knowing nothing of it but its address: the API comes by reflection.
//
//   npm ci
//   node stream.mjs 127.0.0.1:50051 "A dictionary is" 32

import grpc from "@grpc/grpc-js";
import { GrpcReflection } from "grpc-js-reflection-client";

const [address, prompt, maxTokens = "32"] = process.argv.slice(2);
if (address === undefined || prompt === undefined) {
  console.error("usage: node stream.mjs HOST:PORT PROMPT [MAX_TOKENS]");
  process.exit(2);
}
const credentials = grpc.credentials.createInsecure();

const reflection = new GrpcReflection(address, credentials);
console.log("services:", (await reflection.listServices()).join(" "));

const descriptor = await reflection.getDescriptorBySymbol("headway.v1.Generation");
const api = descriptor.getPackageObject({ keepCase: true, enums: String, longs: String, oneofs: true });
const client = new api.headway.v1.Generation(address, credentials);

const call = client.Generate({
  text: prompt,
  sampling: { max_tokens: Number(maxTokens), temperature: 0 },
});
call.on("data", (response) => {
  switch (response.event) {
    case "accepted":
      console.log(`accepted: ${response.accepted.prompt_tokens} prompt tokens`);
      break;
    case "delta":
      console.log(`delta: ${JSON.stringify(response.delta.text)} ${response.delta.token_ids}`);
      break;
    case "finished":
      console.log(`finished: ${response.finished.reason}, ${response.finished.usage.output_tokens} output tokens`);
      break;
  }
});
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
