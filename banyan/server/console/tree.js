// The messages of a conversation form a tree: an edited question and a second answer are branches.
// `leaf` is the last message of the branch that is shown.

export function newId() {
  return crypto.randomUUID?.() ?? `${Date.now()}-${Math.random().toString(36).slice(2)}`;
}

/** The messages that are shown, from the first to the leaf. */
export function pathOf({ messages, leaf }) {
  const byId = new Map(messages.map((message) => [message.id, message]));
  const path = [];
  for (let one = byId.get(leaf); one && path.length < byId.size; one = byId.get(one.parent)) {
    path.push(one);
  }
  return path.reverse();
}

/** Append a message below `parent` and show its branch. */
export function add(conversation, parent, message) {
  const added = { id: newId(), parent, ...message };
  conversation.messages.push(added);
  conversation.leaf = added.id;
  return added;
}

/** The versions of a message: all that follow the same one. */
export function versionsOf({ messages }, { parent }) {
  return messages.filter((message) => message.parent === parent);
}

/** Show the branch of a message: its newest continuation. */
export function showBranch(conversation, message) {
  let last = message;
  for (let steps = conversation.messages.length; steps > 0; steps -= 1) {
    const next = conversation.messages.findLast((one) => one.parent === last.id);
    if (!next) break;
    last = next;
  }
  conversation.leaf = last.id;
}

/** Remove a message without replies; the one before it is shown. */
export function cut(conversation, { id, parent }) {
  conversation.messages = conversation.messages.filter((one) => one.id !== id);
  if (conversation.leaf === id) conversation.leaf = parent;
}
