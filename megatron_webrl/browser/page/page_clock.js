// Random numbers: xorshift32 (G. Marsaglia, Xorshift RNGs, 2003); its state must not be 0.
(seed, start, moved) => {
  const READS_PER_MS = 100;
  const RECENT_MS = 60_000;  // a document modified since is taken for one without a date of modification
  let state = seed | 0;
  const bits = () => { state ^= state << 13; state ^= state >>> 17; state ^= state << 5; return state >>> 0; };
  for (let i = 0; i < 8; i++) bits();
  Math.random = () => ((bits() >>> 5) * 67108864 + (bits() >>> 6)) / 9007199254740992;
  const fill = (bytes) => { for (let i = 0; i < bytes.length; i++) bytes[i] = bits() >>> 24; return bytes; };
  const nativeFill = Crypto.prototype.getRandomValues;
  Crypto.prototype.getRandomValues = function getRandomValues(array) {
    nativeFill.call(this, array);  // refuses what is no array of integers, or too long
    fill(new Uint8Array(array.buffer, array.byteOffset, array.byteLength));
    return array;
  };
  if (Crypto.prototype.randomUUID) Crypto.prototype.randomUUID = function randomUUID() {
    const bytes = fill(new Uint8Array(16));
    bytes[6] = bytes[6] & 15 | 64;
    bytes[8] = bytes[8] & 63 | 128;
    const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
    return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
  };

  let now = start, reads = 0;
  const clock = () => { if (++reads % READS_PER_MS === 0) now += 1; return Math.floor(now); };
  const NativeDate = Date, nativeNow = Date.now;
  NativeDate.now = clock;
  globalThis.Date = NativeDate.prototype.constructor = new Proxy(NativeDate, {
    construct: (target, given, made) => Reflect.construct(target, given.length ? given : [clock()], made),
    apply: () => new NativeDate(clock()).toString(),
  });
  const formats = Intl.DateTimeFormat.prototype, format = Object.getOwnPropertyDescriptor(formats, "format");
  Object.defineProperty(formats, "format", {...format, get() {
    const bound = format.get.call(this);
    return (date) => bound(date === undefined ? clock() : date);
  }});
  const nativeParts = formats.formatToParts;
  formats.formatToParts = function formatToParts(date) {
    return nativeParts.call(this, date === undefined ? clock() : date);
  };
  if (globalThis.Temporal) {
    const {Now, Instant} = Temporal;
    const zoned = (zone = Now.timeZoneId()) => Now.instant().toZonedDateTimeISO(zone);
    Now.instant = () => Instant.fromEpochMilliseconds(clock());
    Now.zonedDateTimeISO = zoned;
    Now.plainDateTimeISO = (zone) => zoned(zone).toPlainDateTime();
    Now.plainDateISO = (zone) => zoned(zone).toPlainDate();
    Now.plainTimeISO = (zone) => zoned(zone).toPlainTime();
  }
  // The date that a header names, as it was before a replay moved it; without one, browsers return the time.
  const modified = Object.getOwnPropertyDescriptor(Document.prototype, "lastModified");
  Object.defineProperty(Document.prototype, "lastModified", {...modified, get() {
    const named = NativeDate.parse(modified.get.call(this));
    const date = new NativeDate(nativeNow() - named < RECENT_MS ? clock() : named - moved);
    const pad = (...numbers) => numbers.map((number) => String(number).padStart(2, "0"));
    return pad(date.getMonth() + 1, date.getDate(), date.getFullYear()).join("/") + " " +
      pad(date.getHours(), date.getMinutes(), date.getSeconds()).join(":");
  }});
  for (const [name, repeats] of [["setTimeout", false], ["setInterval", true]]) {
    const native = globalThis[name];
    globalThis[name] = function (callback, delay, ...given) {
      if (typeof callback !== "function") return native.call(globalThis, callback, delay, ...given);
      const wait = Math.max(0, Number(delay) || 0);
      let due = now + wait;
      const run = function (...passed) {
        now = Math.max(now, due);
        if (repeats) due += wait;
        return callback.apply(this, passed);
      };
      return native.call(globalThis, run, delay, ...given);
    };
  }
  const nativeFrame = requestAnimationFrame;
  let latest = -1;
  globalThis.requestAnimationFrame = (callback) => nativeFrame.call(globalThis, (time) => {
    if (time !== latest) now += 1000 / 60;
    latest = time;
    callback(time);
  });

  // The browser's own clock decides when a cookie expires: a date of the page's clock may have passed.
  const cookie = Object.getOwnPropertyDescriptor(Document.prototype, "cookie");
  Object.defineProperty(Document.prototype, "cookie", {...cookie, set(text) {
    cookie.set.call(this, String(text).replace(/;\s*expires\s*=([^;]*)/i, (whole, date) => {
      const left = (NativeDate.parse(date) - clock()) / 1000;
      return isNaN(left) || /;\s*max-age\s*=/i.test(text) ? whole : "; max-age=" + Math.round(left);
    }));
  }});
}
