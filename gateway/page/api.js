// Requests to the server: the API key, errors, streams of events.

const KEY = "outrider.key";
const LOST = "The server cannot be reached; it may be stopping, starting or behind a lost connection.";

/** A failed request: the server's error message and the HTTP status (0: no response). */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function storedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** A successful response; throws ServerError otherwise. Paths are relative to the page. */
async function request(path, { body, signal } = {}) {
  const headers = {};
  if (storedKey()) headers.Authorization = `Bearer ${storedKey()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(LOST);
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  let sentence = `The server answered ${response.status} ${response.statusText}.`;
  try {
    sentence = (await response.json()).error.message ?? sentence;
  } catch {
    // A proxy has answered, without JSON: show its status.
  }
  return new ServerError(sentence, response.status);
}

export async function getJson(path, signal) {
  return (await request(path, { signal })).json();
}

export async function postJson(path, body, signal) {
  return (await request(path, { body, signal })).json();
}

/** The JSON of each event of a stream; throws an error event. */
export async function* streamJson(path, body, signal) {
  const response = await request(path, { body, signal });
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") return;
    const found = JSON.parse(data);
    if (found.error) throw new ServerError(found.error.message, found.error.code ?? 500);
    yield found;
  }
  throw new ServerError("The stream broke off before its end; send the request again.");
}

/** The `data` of server-sent events, without keep-alive comments. */
async function* eventsOf(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  let lines = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (held + value).split(/\r\n|\n/);
      held = parts.pop();
      for (const line of parts) {
        if (line.startsWith("data:")) lines.push(line.slice(5).trimStart());
        else if (line === "" && lines.length) {
          yield lines.join("\n");
          lines = [];
        }
      }
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(LOST);
  } finally {
    reader.cancel().catch(() => {});
  }
}
