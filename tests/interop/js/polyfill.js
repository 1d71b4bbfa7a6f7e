// Node 20 has no Promise.withResolvers, which parts of js-libp2p use. Imported before them.

Promise.withResolvers ??= function () {
  let resolve, reject
  const promise = new this((...settle) => { [resolve, reject] = settle })
  return { promise, resolve, reject }
}
