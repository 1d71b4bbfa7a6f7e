// The worker's side of /kvasir/experts/1 (docs/protocol.md), with experts that are quickly computed: expert e
// multiplies its row by e + 1. So the weighted sum that comes back shows that numbers, weights and rows arrived
// in their places.

import { decode, encode } from '@msgpack/msgpack'
import { Priority } from './link.js'

export const PROTOCOL = '/kvasir/experts/1'
const HELLO = 1
const WELCOME = 2
const ROWS = 4
const SUMS = 5
const FAILED = 6
const PREFIX_BYTES = 5
const NO_EXPERT = 0xffff

function frameOf (kind, message, payload = new Uint8Array(0)) {
  const header = encode(message)
  const frame = new Uint8Array(PREFIX_BYTES + header.length + payload.length)
  const view = new DataView(frame.buffer)
  view.setUint8(0, kind)
  view.setUint32(1, header.length, true)
  frame.set(header, PREFIX_BYTES)
  frame.set(payload, PREFIX_BYTES + header.length)
  return frame
}

function parsed (frame) {
  const size = new DataView(frame.buffer, frame.byteOffset).getUint32(1, true)
  return {
    kind: frame[0],
    message: decode(frame.subarray(PREFIX_BYTES, PREFIX_BYTES + size)),
    payload: frame.slice(PREFIX_BYTES + size)
  }
}

function sumsOf (rows, chosen, payload) {
  const pairs = rows * chosen
  const ids = new Uint16Array(payload.buffer, 0, pairs)
  const weights = new Float32Array(payload.buffer.slice(2 * pairs, 6 * pairs))
  const x = new Float32Array(payload.buffer.slice(6 * pairs))
  const width = x.length / rows
  const sums = new Float32Array(x.length)
  for (let row = 0; row < rows; row++) {
    let factor = 0
    for (let i = row * chosen; i < (row + 1) * chosen; i++) {
      if (ids[i] !== NO_EXPERT) factor += weights[i] * (ids[i] + 1)
    }
    for (let i = row * width; i < (row + 1) * width; i++) sums[i] = factor * x[i]
  }
  return new Uint8Array(sums.buffer)
}

// Answer one dispatcher until it leaves.
export async function serve (link, ranges) {
  const first = await link.receive()
  if (first == null || first[0] !== HELLO) throw new Error('no hello')
  const [, , dtype] = parsed(first).message
  if (dtype !== 'f32') throw new Error(`rows in ${dtype}, f32 is known`)
  link.send(frameOf(WELCOME, [ranges, 16, 'exact']))
  for (;;) {
    const frame = await link.receive()
    if (frame == null) return
    const { kind, message: [id, layer, rows, chosen], payload } = parsed(frame)
    if (kind !== ROWS) throw new Error(`message kind ${kind}`)
    if (ranges.some(range => range[0] === layer)) {
      link.send(frameOf(SUMS, [id, rows, 0.5], sumsOf(rows, chosen, payload)), Priority.decode)
    } else {
      link.send(frameOf(FAILED, [id, `layer ${layer} is not here`]), Priority.decode)
    }
  }
}
