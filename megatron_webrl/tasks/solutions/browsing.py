"""Environments with small applications: mail, social network, search engine, contacts."""

from __future__ import annotations

# Typing ends with Enter, which adds an extra line to a reply.
_MAIL = """(({task, by, to, message}) => {
  const [reply, field] = [$('#reply-text'), $('.forward-sender')];
  if (reply) {
    return reply.value === message + '\\n' ? {key: 'Backspace'} : fill([[reply, message]], {element: $('#send-reply')});
  }
  if (field) return fill([[field, to]], {element: $('#send-forward')});
  if (shown('#email')) return into($(task === 'reply' ? '.email-reply' : '.email-forward'));
  const thread = all('#main .email-thread').find((e) => say(e.querySelector('.email-sender')) === by);
  return into(thread.querySelector({delete: '.trash', star: '.star'}[task] || '.email-left'));
})(WANTED)"""

_MAIL_FROM_QUERY = _MAIL.replace(
    "WANTED",
    r"""{
  task: /trash/.test(query()) ? 'delete' : /star/.test(query()) ? 'star'
    : /forward/.test(query()) ? 'forward' : 'reply',
  by: asked(/email by (\S+) and/), to: (query().match(/ to (\S+)\.$/) || [])[1],
  message: (query().match(/"(.*)"/) || [])[1],
}""",
)
_MAIL_FIELDS = _MAIL.replace("WANTED", "core.currentFields")

_POSTS = """(() => {
  const label = say(all('#query .bold')[0]), user = say(all('#query .bold').at(-1));
  const kind = Object.keys(ACTIONS).find((name) => ACTIONS[name] === label);
  const buttons = all('.media').filter((post) => say(post.querySelector('.username')) === user)
    .map((post) => post.querySelector(`.${kind}`));
  const pressed = buttons.filter((button) => button.classList.contains('active')).length;
  return pressed < (AMOUNT) ? into(buttons.find((button) => !button.classList.contains('active')))
    : into($('#submitRow button'));
})()"""

TARGET_SCRIPTS = {
    **dict.fromkeys(
        [
            "email-inbox", "email-inbox-delete", "email-inbox-forward", "email-inbox-important", "email-inbox-noscroll",
            "email-inbox-reply", "email-inbox-star-reply",
        ],
        _MAIL_FROM_QUERY,
    ),
    **dict.fromkeys(["email-inbox-forward-nl", "email-inbox-forward-nl-turk", "email-inbox-nl-turk"], _MAIL_FIELDS),
    "social-media": """(() => {
      const [user, label] = all('#query .bold').map(say);
      const kind = Object.keys(ACTIONS).find((name) => ACTIONS[name] === label);
      const post = all('.media').find((e) => say(e.querySelector('.username')) === user);
      const button = post.querySelector(`.${kind}`);
      return into(button.offsetHeight ? button : post.querySelector('.more'));
    })()""",
    "social-media-all": _POSTS.replace("AMOUNT", "buttons.length"),
    "social-media-some": _POSTS.replace("AMOUNT", "Number(say(all('#query .bold')[1]))"),
    "search-engine": r"""(() => {
      const place = ordinal() - 1, link = $(`#page-content a[data-result="${place}"]`);
      return fill([[$('#search-text'), quoted()]], !$('#page-content a') ? {element: $('#search')}
        : {element: link || named('#pagination a', String(Math.floor(place / 3) + 1))});
    })()""",
    "phone-book": r"""{element: say($('#contact .name')) === asked(/^Find (.*) in the contact/)
      ? $(`#contact a.${query().match(/their (phone|email|address)/)[1]}`) : named('#pagination a', '>')}""",
}  # fmt: skip
