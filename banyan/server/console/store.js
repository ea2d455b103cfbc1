// Conversations in this browser's IndexedDB, one record each. An answer that is on its way is kept
// in localStorage too, because only that can be written while a page is closed.

const DATABASE = "banyan";
const TABLE = "conversations";
const PARTIAL = "banyan.partial.";

let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function run(mode, work) {
  const transaction = (await database()).transaction(TABLE, mode);
  const request = work(transaction.objectStore(TABLE));
  await new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
  return request?.result;
}

export async function get(id) {
  return await run("readonly", (table) => table.get(id)) ?? null;
}

export function put(conversation) {
  return run("readwrite", (table) => table.put(conversation));
}

export function remove(id) {
  localStorage.removeItem(PARTIAL + id);
  return run("readwrite", (table) => table.delete(id));
}

/** What `take` returns of each conversation, without null. */
export async function each(take) {
  const found = [];
  await run("readonly", (table) => {
    table.openCursor().onsuccess = ({ target: { result: cursor } }) => {
      if (!cursor) return;
      const taken = take(cursor.value);
      if (taken != null) found.push(taken);
      cursor.continue();
    };
  });
  return found;
}

/** Keep the message of an answer that is not complete. Works while the page is closed. */
export function keepPartial(id, message) {
  try {
    localStorage.setItem(PARTIAL + id, JSON.stringify(message));
  } catch { /* full: the answer is kept when it is complete */ }
}

export function dropPartial(id) {
  localStorage.removeItem(PARTIAL + id);
}

/** Put the answers that were on their way when a page was closed into their conversations. */
export async function restorePartials() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PARTIAL));
  for (const key of keys) {
    const conversation = await get(key.slice(PARTIAL.length));
    const message = parsed(localStorage.getItem(key));
    const at = conversation?.messages.findIndex(({ id }) => id === message?.id) ?? -1;
    if (at >= 0) {
      conversation.messages[at] = message;
      await put(conversation);
    }
    localStorage.removeItem(key);
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;  // not written by this console
  }
}
