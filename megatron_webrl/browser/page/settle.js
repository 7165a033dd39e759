// Resolves to [title, URL, scrollX, scrollY, page height] once the document is complete and two animation frames in a
// row have passed without a change of the document or a scroll: the first frame lets handlers run, the second has
// painted their changes. Between them a timer must have run: on a busy machine frames overtake the timers that an
// animation by script is made of. A later timer replaces animation frames that never come, as in a page that is being
// replaced. Limits are in milliseconds or characters; `still`: end the animations of the page's styles.
({quietLimit, timer, bubbleLimit, maxTitle, maxURL, still}) => new Promise((resolve) => {
  // A form named "title" shadows document.title; the getters of the prototype cannot be shadowed.
  const native = (name) => Object.getOwnPropertyDescriptor(Document.prototype, name).get.call(document);
  // Shows the end of an animation that has one, and the beginning of an endless one; returns whether that was a change.
  // A time that is set while the pause is pending may never be painted.
  const endAnimation = (animation) => {
    if (animation.timeline !== document.timeline || !animation.effect || !animation.playbackRate) return false;
    if (animation.effect.getComputedTiming().endTime !== Infinity) {
      if (animation.playState === "finished") return false;
      animation.finish();
      return true;
    }
    if (animation.playState !== "paused") animation.pause();
    else if (!animation.pending && animation.currentTime === 0) return false;
    else if (!animation.pending) animation.currentTime = 0;
    return true;
  };
  const start = performance.now();
  let moved = false, quiet = 0;
  const mark = () => { moved = true; };
  const observer = new MutationObserver(mark);
  observer.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
  addEventListener("scroll", mark, true);
  const finish = () => {
    observer.disconnect();
    removeEventListener("scroll", mark, true);
    const root = native("scrollingElement") || native("documentElement");
    resolve([native("title").slice(0, maxTitle), location.href.slice(0, maxURL),
             Math.round(scrollX), Math.round(scrollY), root ? root.scrollHeight : 0]);
  };
  const next = () => {
    let pending = quiet ? 2 : 1;
    const pass = () => { pending -= 1; if (!pending) frame(); };
    requestAnimationFrame(pass);
    if (quiet) setTimeout(pass, timer);
    setTimeout(() => { if (pending > 0) { pending = 0; frame(); } }, 200);
  };
  const frame = () => {
    const ready = native("readyState") === "complete";
    const waited = performance.now() - start;
    if (still && document.getAnimations().filter(endAnimation).length) moved = true;
    const field = native("activeElement");
    const bubble = still && waited < bubbleLimit && field && field.matches(":invalid");
    quiet = ready && !moved && !bubble ? quiet + 1 : 0;
    moved = false;
    if (quiet >= 2 || !bubble && waited > quietLimit) finish(); else next();
  };
  next();
})
