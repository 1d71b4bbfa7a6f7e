// Links of Kvasir over a js-libp2p stream: whole frames, cut into pieces, as docs/protocol.md says in "Links".
// This side never moves a link to another stream, and says so.

const FIRST = 1 << 29
const LAST = 1 << 28
const OWN = 1 << 27
const LENGTH_MASK = 0x00ffffff
const HELLO = 1
const REFUSED = 2
const WELCOME = 3
const LINK_VERSION = 1
const LINK_ID_BYTES = 16
const MAX_OWN_BYTES = 256
const PRIORITIES = 4
const PIECE_BYTES = 16 * 1024

export const Priority = { control: 0, decode: 1, prefill: 2, weights: 3 }

function head (flags, length) {
  const bytes = new Uint8Array(4)
  new DataView(bytes.buffer).setUint32(0, (flags | length) >>> 0)
  return bytes
}

function uint32 (value) {
  const bytes = new Uint8Array(4)
  new DataView(bytes.buffer).setUint32(0, value)
  return bytes
}

function joined (parts) {
  const whole = new Uint8Array(parts.reduce((size, part) => size + part.length, 0))
  let at = 0
  for (const part of parts) {
    whole.set(part, at)
    at += part.length
  }
  return whole
}

export class Link {
  // `stream`: of libp2p 2.x. `opener`: whether this side opened it. `maxFrame`: largest frame taken, bytes.
  constructor (stream, { opener, maxFrame = 16 * 1024 * 1024 }) {
    this.maxFrame = maxFrame
    this.linkId = null
    this.error = null
    this.ended = false
    this._stream = stream
    this._opener = opener
    this._outgoing = Array.from({ length: PRIORITIES }, () => [])
    this._own = []
    this._frames = []
    this._closing = false
    this._wakeSender = () => {}
    this._wakeReceiver = () => {}
    if (opener) {
      this.linkId = crypto.getRandomValues(new Uint8Array(LINK_ID_BYTES))
      this._own.push(joined([Uint8Array.of(HELLO, LINK_VERSION), this.linkId, Uint8Array.of(0)]))
    }
    this._sending = stream.sink(this._pieces()).catch(error => this._fail(error))
    this._receiving = this._read().catch(error => {
      this._fail(error)
      stream.abort(error)
    })
  }

  send (frame, priority = Priority.control) {
    if (this.error != null) throw this.error
    if (this.ended || this._closing) throw new Error('the link is closed')
    this._outgoing[priority].push({ frame, sent: 0 })
    this._wakeSender()
  }

  // The next frame, or null at the end of the link.
  async receive () {
    while (this._frames.length === 0) {
      if (this.error != null) throw this.error
      if (this.ended) return null
      await new Promise(resolve => { this._wakeReceiver = resolve })
    }
    return this._frames.shift()
  }

  // Send what is queued, then the end.
  async close () {
    this._closing = true
    this._wakeSender()
    await this._sending
    await this._stream.close()
  }

  _fail (error) {
    this.error ??= error
    this._wakeSender()
    this._wakeReceiver()
  }

  async * _pieces () {
    while (this.error == null) {
      if (this._own.length > 0) {
        const message = this._own.shift()
        yield joined([head(OWN, message.length), message])
        continue
      }
      const priority = this._outgoing.findIndex(queue => queue.length > 0)
      if (priority < 0) {
        if (this._closing) return
        await new Promise(resolve => { this._wakeSender = resolve })
        continue
      }
      const next = this._outgoing[priority][0]
      const left = next.frame.length - next.sent
      const count = Math.min(left, PIECE_BYTES)
      const flags = (priority << 30) | (next.sent === 0 ? FIRST : 0) | (count === left ? LAST : 0)
      const parts = [next.frame.subarray(next.sent, next.sent + count)]
      if (next.sent === 0 && count < left) parts.unshift(uint32(next.frame.length))
      next.sent += count
      if (count === left) this._outgoing[priority].shift()
      const payload = joined(parts)
      yield joined([head(flags, payload.length), payload])
    }
  }

  async _read () {
    const reader = new Reader(this._stream.source)
    const frames = new Array(PRIORITIES).fill(null)
    for (;;) {
      const start = await reader.take(4)
      if (start == null) break
      const bits = new DataView(start.buffer, start.byteOffset).getUint32(0)
      const length = bits & LENGTH_MASK
      if (length > this.maxFrame + 4) throw new Error(`a piece of ${length} bytes`)
      const priority = bits >>> 30
      if ((bits & OWN) !== 0 && (length < 1 || length > MAX_OWN_BYTES)) throw new Error('a link message of a wrong size')
      let payload = length === 0 ? new Uint8Array(0) : await reader.take(length)
      if (payload == null) throw new Error('the stream ended within a piece')
      if ((bits & OWN) !== 0) {
        this._ownReceived(payload)
        continue
      }
      if (!this._opener && this.linkId == null) throw new Error('a frame came before the hello')
      if ((bits & FIRST) !== 0) {
        if (frames[priority] != null) throw new Error('a frame began inside another of its priority')
        let size = payload.length
        if ((bits & LAST) === 0) {
          size = new DataView(payload.buffer, payload.byteOffset).getUint32(0)
          payload = payload.subarray(4)
        }
        if (size > this.maxFrame) throw new Error(`a frame of ${size} bytes, ${this.maxFrame} are allowed`)
        frames[priority] = { bytes: new Uint8Array(size), filled: 0 }
      }
      const frame = frames[priority]
      if (frame == null) throw new Error('a piece of a frame that never began')
      frame.bytes.set(payload, frame.filled)
      frame.filled += payload.length
      if ((bits & LAST) !== 0) {
        if (frame.filled !== frame.bytes.length) throw new Error('a frame ended before its length')
        frames[priority] = null
        this._frames.push(frame.bytes)
        this._wakeReceiver()
      }
    }
    this.ended = true
    this._closing = true
    this._wakeSender()
    this._wakeReceiver()
  }

  _ownReceived (message) {
    if (message[0] === HELLO) {
      if (this._opener || this.linkId != null || message[1] < LINK_VERSION) throw new Error('a wrong hello')
      this.linkId = message.slice(2, 2 + LINK_ID_BYTES)
      if (message[2 + LINK_ID_BYTES] > 0) {
        this._own.push(Uint8Array.of(WELCOME, 0))
        this._wakeSender()
      }
    } else if (message[0] === REFUSED && this._opener) {
      this._fail(new Error(`refused: ${new TextDecoder().decode(message.subarray(1))}`))
    } else {
      throw new Error(`a link message of kind ${message[0]}`)
    }
  }
}

// Takes exact numbers of bytes from a stream's source.
class Reader {
  constructor (source) {
    this._source = source[Symbol.asyncIterator]()
    this._parts = []
    this._size = 0
  }

  async take (count) {
    while (this._size < count) {
      const { value, done } = await this._source.next()
      if (done) {
        if (this._size > 0) throw new Error('the stream ended within a piece')
        return null
      }
      const bytes = value.subarray()
      if (bytes.length > 0) {
        this._parts.push(bytes)
        this._size += bytes.length
      }
    }
    const whole = new Uint8Array(count)
    let filled = 0
    while (filled < count) {
      const part = this._parts[0]
      const step = Math.min(part.length, count - filled)
      whole.set(part.subarray(0, step), filled)
      filled += step
      if (step === part.length) this._parts.shift()
      else this._parts[0] = part.subarray(step)
    }
    this._size -= count
    return whole
  }
}
