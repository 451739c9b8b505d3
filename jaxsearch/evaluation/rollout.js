// Draws a rollout: its tree, and its text with the tokens coloured. Shared by the viewer and the report of a run.

const $ = (id) => document.getElementById(id)
const make = (tag, attributes = {}, ...children) => {
  const svg = ['svg', 'rect', 'path', 'g', 'text', 'title', 'circle', 'defs', 'pattern', 'line'].includes(tag)
  const node = svg ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value)
    else if (value !== undefined && value !== false) node.setAttribute(name, value === true ? '' : value)
  }
  node.append(...children.filter((one) => one !== null && one !== undefined))
  return node
}
const mean = (values) => values.length ? values.reduce((a, b) => a + b, 0) / values.length : null
const number = (value, digits = 2) => value === null || value === undefined ? '–' :
  typeof value !== 'number' ? String(value) : (+value.toFixed(digits)).toString().replace('-', '−')
const signed = (value, digits = 2) => (value > 0 ? '+' : '') + number(value, digits)

// Colours of tokens.

const BLUE = [31, 111, 178], RED = [200, 69, 47], ORANGE = [217, 119, 6], GREEN = [22, 128, 84], GREY = [110, 120, 130], PURPLE = [107, 79, 160], GOLD = [192, 138, 30]
const tint = (share, hue) => `rgb(${hue.map((one) => Math.round(255 + share * (one - 255))).join(',')})`
const ROLES = {prompt: [GREY, .18], policy: [BLUE, .28], observation: [GOLD, .3], context: [PURPLE, .25]}
const MODELS = ['judge', 'reader', 'refiner', 'classifier', 'score']  // all other calls are of tools
const at = (values, i) => values === undefined || values === null ? null : Array.isArray(values) ? values[i] ?? null : values
const diverging = (value, full) => value === null ? null : tint(.72 * Math.min(1, Math.abs(value) / full), value >= 0 ? BLUE : RED)
const SIGNALS = {
  role: {value: () => null, colour: (span) => tint(ROLES[span.role][1], ROLES[span.role][0]), scale: () => ''},
  advantage: {value: (s, i) => s.trained === false ? null : at(s.advantages ?? s.advantage, i), full: (values) => Math.max(...values.map(Math.abs), 1e-6), scale: (full) => [`−${number(full)}`, RED, BLUE, `+${number(full)}`]},
  value: {value: (s, i) => at(s.values ?? s.value, i), full: (values) => Math.max(1, ...values), colour: (s, v, full) => v === null ? null : tint(.75 * Math.max(0, Math.min(1, v / full)), GREEN), scale: (full) => ['0', null, GREEN, number(full)]},
  'log-probability': {value: (s, i) => at(s.sampler_logprobs, i), full: () => 4, colour: (s, v, full) => v === null ? null : tint(.8 * Math.min(1, -v / full), ORANGE), scale: () => ['0 (sure)', null, ORANGE, '−4']},
  ratio: {value: (s, i) => { const a = at(s.old_logprobs, i), b = at(s.sampler_logprobs, i); return a === null || b === null ? null : Math.exp(a - b) }, full: () => .2, colour: (s, v, full) => v === null ? null : diverging(Math.log(v), full), scale: () => ['0.8', RED, BLUE, '1.2'], why: 'trainer / sampler'},
  'drift from reference': {value: (s, i) => { const a = at(s.sampler_logprobs, i), b = at(s.ref_logprobs, i); return a === null || b === null ? null : a - b }, full: (values) => Math.max(.05, Math.min(2, ...[Math.max(0, ...values.map(Math.abs))])), scale: (full) => [`−${number(full)} nats`, RED, BLUE, `+${number(full)}`], why: 'log-probability minus that of the reference'},
  mask: {value: (s) => s.trained === undefined ? null : +s.trained, full: () => 1, colour: (s, v) => v === null ? null : v ? tint(.4, BLUE) : tint(.22, GREY), scale: () => ['not trained', GREY, BLUE, 'trained']}}
let signal = 'role', wanted = 'role'  // the colour that is shown, and the one to show where there is any
const length = (span) => span.ids ? span.ids.length : typeof span.tokens === 'number' ? span.tokens : Math.max(1, Math.round(span.text.length / 4))
const has = (records, name) => name === 'role' || records.some((record) => record.spans.some((span) => SIGNALS[name].value(span, 0) !== null || (span.ids && span.ids.some((_, i) => SIGNALS[name].value(span, i) !== null))))
function fullOf(records) {
  const own = SIGNALS[signal]
  if (!own.full) return 1
  const values = []
  for (const record of records) for (const span of record.spans) for (let i = 0, n = span.ids ? span.ids.length : 1; i < n; i++) { const v = own.value(span, i); if (v !== null) values.push(v) }
  return own.full(values.length > 50000 ? values.filter((_, i) => i % 10 === 0) : values)
}
function colourOf(span, i, full) {
  const own = SIGNALS[signal], v = own.value(span, i)
  return signal === 'role' ? own.colour(span) : own.colour ? own.colour(span, v, full) : diverging(v, full)
}

// The tree of a rollout: x is the place on the path in tokens, a lane for each fork.

function layout(record) {
  if (record.nodes) return record.nodes
  const nodes = record.spans.map((span, i) => ({span, i, children: [], dropped: !!span.dropped,
    forgotten: span.folded ? 'folded later' : span.role === 'observation' && (record.spans[i + 1] || {}).segment === 'assimilate' && 'forgotten after the next span'}))
  const roots = []
  nodes.forEach((node, i) => { const parent = node.span.parent ?? i - 1; if (parent >= 0) { node.parent = nodes[parent]; nodes[parent].children.push(node) } else roots.push(node) })
  nodes.forEach((node) => { const before = node.span.fold === undefined ? node.parent : nodes[node.span.after]; node.start = before ? before.end : 0; node.end = node.start + length(node.span) })
  for (let i = nodes.length - 1; i >= 0; i--) nodes[i].extent = Math.max(nodes[i].end, ...nodes[i].children.map((child) => child.extent))
  const taken = []
  const place = (first, lane) => {  // `first` and what goes on from it stay in the lane; their other children look for room below
    const line = []
    for (let node = first; node;) { line.push(node); node.lane = lane; node.kids = [...node.children].sort((a, b) => a.dropped - b.dropped || a.i - b.i); node = node.kids[0] && node.kids[0].span.fold === undefined ? node.kids[0] : null }
    const end = line[line.length - 1].end;
    (taken[lane] ??= []).push([first.start, end])
    for (const node of line.reverse()) for (const child of node.kids.filter((kid) => kid.lane === undefined)) {
      let free = lane + 1
      while ((taken[free] || []).some(([a, b]) => a < child.extent && child.start < b)) free++
      place(child, free)
    }
  }
  roots.forEach((root) => place(root, taken.length))
  record.lanes = Math.max(1, taken.length)
  record.extent = Math.max(1, ...nodes.map((node) => node.extent))
  return record.nodes = nodes
}
const words = (node) => { const found = /<(think|search|answer|information|evidence|original_evidence|observation|context|code|python)\b/.exec(node.span.text); return node.span.segment || (node.span.role === 'policy' ? (found && [...node.span.text.matchAll(/<(search|answer|code|python)\b/g)].map((m) => m[1]).pop()) || (found ? found[1] : 'policy') : node.span.role === 'observation' ? 'tool' : node.span.role) }
function drawTree(record, longest, laneHeight, width, full, big) {
  const nodes = layout(record), gap = big ? 5 : 1, step = laneHeight + gap, top = big ? 14 : 1, height = record.lanes * step + top
  const fullWidth = big ? Math.max(width, nodes.length * 9) : width, scale = (fullWidth - 4) / longest
  const svg = make('svg', {viewBox: `0 0 ${fullWidth} ${height}`, height, role: 'img', preserveAspectRatio: 'none', 'aria-label': `tree of ${nodes.length} spans in ${record.lanes} lanes`, style: big && fullWidth > width ? `width:${fullWidth}px` : ''})
  const hatch = (id, path, colour) => make('pattern', {id, width: 6, height: 6, patternUnits: 'userSpaceOnUse'}, make('path', {d: path, stroke: colour, 'stroke-width': 1.2}))
  svg.append(make('defs', {}, hatch('cut', 'M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2', '#5a6977'), hatch('forgot', 'M0,3 h6', '#5a6977')))
  for (const node of nodes) {
    const x = 2 + node.start * scale, w = Math.max(1.5, (node.end - node.start) * scale - (big ? .8 : .4)), y = top + node.lane * step
    if (node.parent && node.parent.lane !== node.lane) svg.append(make('path', {d: `M${x},${top + node.parent.lane * step + laneHeight / 2} V${y + laneHeight / 2} h2`, fill: 'none', stroke: '#5a6977', 'stroke-width': node.dropped ? .8 : 1.4, 'stroke-dasharray': node.dropped ? '2 2' : undefined}))
    const group = make('g', {class: 'span', 'data-span': node.i})
    const n = node.span.ids ? node.span.ids.length : 1, bins = signal === 'role' ? 1 : Math.max(1, Math.min(n, Math.floor(w / 2), 400))
    for (let b = 0; b < bins; b++) {
      const from = Math.floor(b * n / bins), until = Math.max(from + 1, Math.floor((b + 1) * n / bins))
      let colour = null, best = -1
      for (let i = from; i < until; i++) { const v = SIGNALS[signal].value(node.span, i), size = v === null ? 0 : Math.abs(v); if (size > best) { best = size; colour = colourOf(node.span, i, full) } }
      const fill = colour ?? '#f2f4f6', before = group.lastChild
      if (before && before.getAttribute('fill') === fill) before.setAttribute('width', x + (b + 1) * w / bins - before.getAttribute('x'))
      else group.append(make('rect', {x: x + b * w / bins, y, width: w / bins, height: laneHeight, fill}))
    }
    if (node.dropped || node.forgotten) group.append(make('rect', {x, y, width: w, height: laneHeight, fill: `url(#${node.dropped ? 'cut' : 'forgot'})`, opacity: .75}))
    group.append(make('rect', {x, y, width: w, height: laneHeight, fill: 'none', stroke: '#7d8b99', 'stroke-width': big ? .8 : .5}))
    const calls = node.span.calls || [], failed = calls.some((call) => call.failure)
    const tools = calls.some((call) => !MODELS.includes(call.tool)) || (node.span.role === 'policy' && node.children.some((child) => child.span.role === 'observation'))
    if (big) {
      const label = words(node)
      if (w > 7 * label.length + 4) group.append(make('text', {x: x + 4, y: y + laneHeight / 2 + 4}, label))
      if (tools) group.append(make('path', {class: 'tool', d: `M${x + w - 4.5},${y - 7} h9 l-4.5,6 z`, fill: failed ? '#b3261e' : '#8a5a00'}))
      if (calls.some((call) => MODELS.includes(call.tool))) group.append(make('circle', {class: 'judge', cx: x + w / 2, cy: y - 4, r: 3, fill: failed ? '#b3261e' : '#6b4fa0'}))
      group.addEventListener('click', () => {
        const block = svg.closest('.column').querySelector(`.block[data-span="${node.i}"]`)
        for (let up = block; up; up = up.parentElement) if (up.tagName === 'DETAILS') up.open = true
        block.scrollIntoView({block: 'center', behavior: 'smooth'})
        block.classList.add('flash'); setTimeout(() => block.classList.remove('flash'), 1500)
      })
    } else if (tools) group.append(make('path', {class: 'tool', d: `M${x + w - 3},${y} h6 l-3,4 z`, fill: failed ? '#b3261e' : '#8a5a00'}))
    const credit = SIGNALS.advantage.value(node.span, 0)
    group.append(make('title', {}, `${words(node)} · ${length(node.span)} tokens${node.span.ids || node.span.tokens ? '' : ' (about)'}${credit !== null ? ` · advantage ${signed(credit)}` : ''}${node.dropped ? ' · cut off' : ''}${node.forgotten ? ` · ${node.forgotten}` : ''}${node.span.fold === undefined ? '' : ` · folded: ${node.span.fold} tokens saved`}\n${node.span.text.slice(0, 300)}`))
    svg.append(group)
  }
  return svg
}

// The text of a rollout.

const escapeRegex = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, '\\$&')
function ranges(text, phrases) {  // of whole phrases, whatever case, punctuation and articles are between their words
  const found = []
  for (const phrase of phrases) {
    const parts = phrase.toLowerCase().split(/[^\p{L}\p{N}]+/u).filter((word) => word && !['a', 'an', 'the'].includes(word))
    if (!parts.length) continue
    const between = '[^\\p{L}\\p{N}]+(?:(?:a|an|the)[^\\p{L}\\p{N}]+)?'
    for (const match of text.matchAll(RegExp(`(?<![\\p{L}\\p{N}])${parts.map(escapeRegex).join(between)}(?![\\p{L}\\p{N}])`, 'giu'))) found.push([match.index, match.index + match[0].length])
  }
  return found
}
function tokensOf(span, spanIndex, golds, found, full) {
  const box = make('div', {class: `tokens${signal === 'role' ? '' : ' coloured'}`}), text = span.text
  let ends
  if (span.lengths) { let total = 0; ends = span.lengths.map((one) => total += one) } else ends = [text.length]
  const tags = [...text.matchAll(/<\/?[a-z_]+>/g)].map((match) => [match.index, match.index + match[0].length])
  const marks = ranges(text, golds), low = text.toLowerCase(), hit = []
  for (const word of found) for (let i = low.indexOf(word); i >= 0 && hit.length < 500; i = low.indexOf(word, i + 1)) hit.push([i, i + word.length])
  const edges = [...new Set([0, ...ends, text.length, ...marks.flat(), ...tags.flat(), ...hit.flat()])].filter((one) => one <= text.length).sort((a, b) => a - b)
  let token = 0
  for (let e = 0; e + 1 < edges.length; e++) {
    const [start, end] = [edges[e], edges[e + 1]]
    while (token < ends.length - 1 && ends[token] <= start) token++
    const piece = make('span', {'data-t': span.lengths ? token : undefined, 'data-s': spanIndex}, text.slice(start, end))
    const colour = span.lengths || signal === 'role' || signal === 'mask' || !Array.isArray(span.ids) ? colourOf(span, token, full) : null
    if (colour && signal !== 'role') piece.style.background = `color-mix(in srgb, ${colour} 75%, white)`
    if (tags.some(([a, b]) => a <= start && end <= b)) piece.className = 'tag'
    if (marks.some(([a, b]) => a <= start && end <= b)) piece.classList.add('gold')
    if (hit.some(([a, b]) => a <= start && end <= b)) piece.classList.add('hit')
    box.append(piece)
  }
  return box
}
function callsOf(span, golds) {
  return (span.calls || []).map((call) => {
    const box = make('div', {class: `call${call.failure ? ' failed' : ''}`})
    const query = call.query.length > 160 || call.query.includes('\n') ? make('details', {}, make('summary', {}, `asked: ${call.query.replaceAll('\n', ' ').slice(0, 110)}…`), call.query) : ` ${call.query}`
    box.append(make('b', {}, `${MODELS.includes(call.tool) ? '●' : '▾'} ${call.tool}${call.about ? ` · ${call.about}` : ''}`), call.cue ? ` behind ${call.cue}:` : '', query)
    if (call.failure) box.append(make('div', {}, `failed (${call.fault}): ${call.failure}`))
    if (call.documents) {
      const right = call.documents.filter((d) => ranges(`${d.title}\n${d.text}`, golds).length).length
      const list = make('details', {}, make('summary', {}, `${call.documents.length} document${call.documents.length === 1 ? '' : 's'}${right ? `, ${right} with a gold answer` : ''}: ${call.documents.map((d) => d.title).join(' · ')}`))
      call.documents.forEach((d) => list.append(make('div', {}, make('b', {}, d.title), ` ${d.score ? `(${number(d.score)}) ` : ''}`, ...marked(d.text, golds))))
      box.append(list)
    }
    if (typeof call.reply === 'string' && call.reply.length > 120) box.append(make('details', {}, make('summary', {}, `→ ${call.reply.slice(0, 110).replaceAll('\n', ' ')}…`), ...marked(call.reply, golds)))
    else if (call.reply !== undefined) box.append(make('div', {}, '→ ', make('b', {}, Array.isArray(call.reply) ? call.reply.map((one) => number(one)).join(' | ') : typeof call.reply === 'number' ? signed(call.reply) : call.reply)))
    if (call.reason) box.append(make('div', {class: 'reason'}, call.reason))
    return box
  })
}
function marked(text, golds) {
  const list = []
  let last = 0
  for (const [a, b] of ranges(text, golds).sort((x, y) => x[0] - y[0])) if (a >= last) { list.push(text.slice(last, a), make('span', {class: 'gold'}, text.slice(a, b))); last = b }
  return [...list, text.slice(last)]
}
function blockOf(node, record, found, full) {
  const span = node.span, credit = at(span.advantages ?? span.advantage, 0), many = Array.isArray(span.advantages) && new Set(span.advantages).size > 1
  const bits = [span.role === 'observation' ? 'tool output' : span.role + (span.segment ? ` · ${span.segment}` : ''), `${length(span)} tokens${span.ids || span.tokens ? '' : ' (about)'}`]
  if (node.dropped) bits.push('cut off'); if (node.forgotten) bits.push(node.forgotten)
  if (span.fold !== undefined) bits.push(`folded: ${span.fold} tokens saved`)
  if (span.stop) bits.push(`stop ${span.stop}`)
  if (span.trained === false && span.role === 'policy') bits.push('not trained')
  for (const [name, value] of Object.entries(span.notes || {})) bits.push(`${name.replaceAll('_', ' ')} ${number(value)}`)
  if (span.sampler_logprobs && span.sampler_logprobs.length) bits.push(`mean log-probability ${number(mean(span.sampler_logprobs))}`)
  const value = at(span.values ?? span.value, 0)
  const label = make('div', {class: 'label'}, bits.join(' · '), value !== null ? ` · V ${number(value)}` : '', ...(credit !== null && span.trained !== false ? [' · advantage ', make('b', {}, many ? `${signed(Math.min(...span.advantages))} to ${signed(Math.max(...span.advantages))}` : signed(credit))] : []))
  const box = make('div', {class: `block ${span.role}${node.dropped || node.forgotten ? ' gone' : ''}`, 'data-span': node.i}, label)
  const tokens = tokensOf(span, node.i, span.role === 'prompt' ? [] : record.golden_answers, found, full)
  box.append(span.role === 'prompt' ? make('details', {}, make('summary', {}, 'prompt'), tokens) : tokens, ...callsOf(span, record.golden_answers))
  return box
}
function textOf(record, found, full) {
  const list = [], nodes = layout(record)
  const follow = (first, into) => {
    for (let node = first; node; node = node.kids[0]) {
      into.push(blockOf(node, record, found, full))
      const others = node.kids.slice(1)
      if (others.length) {
        const inner = make('details', {open: others.length < 2}, make('summary', {}, `${others.length} other branch${others.length > 1 ? 'es' : ''} from here`))
        for (const child of others) { const own = []; follow(child, own); inner.append(make('div', {class: 'branches'}, make('div', {class: 'label'}, `branch ${node.children.indexOf(child) + 1} of ${node.children.length}`), ...own)) }
        into.push(inner)
      }
    }
  }
  nodes.filter((node) => !node.parent).forEach((root) => follow(root, list))
  return list
}

function legendOf(full) {
  const scale = SIGNALS[signal].scale(full)
  const legend = make('div', {class: 'legend'})
  if (signal === 'role') for (const role of ['prompt', 'policy', 'observation', 'context']) legend.append(make('span', {}, make('i', {style: `background:${tint(ROLES[role][1], ROLES[role][0])}`}), role === 'observation' ? 'tool output' : role))
  else legend.append(make('span', {}, scale[0], make('span', {class: 'scale', style: `background:linear-gradient(90deg,${scale[1] ? tint(.72, scale[1]) + ',#fff,' : '#fff,'}${tint(.75, scale[2])})`}), scale[3], SIGNALS[signal].why ? `  (${SIGNALS[signal].why})` : ''))
  legend.append(make('span', {}, make('i', {style: 'background:repeating-linear-gradient(135deg,#fff 0 3px,#7d8b99 3px 4px)'}), 'cut off'), make('span', {}, make('i', {style: 'background:repeating-linear-gradient(0deg,#fff 0 3px,#7d8b99 3px 4px)'}), 'forgotten'), make('span', {}, '▾ tool call'), make('span', {}, '● judge or reader'), make('span', {class: 'gold'}, 'gold answer'))
  return legend
}
function partsOf(record, found, full, width) {  // of a column: the outcome, the tree, the text
  const facts = [`reward ${number(record.reward ?? record.em)}`, `${record.searches} search${record.searches === 1 ? '' : 'es'}`,
    record.tokens === undefined ? null : `${record.tokens} tokens sampled`, `stop ${(record.stop ?? '–').replaceAll('_', ' ')}`]
  for (const [name, value] of Object.entries(record.metrics || {})) {
    if (value && name !== 'searches') facts.push(`${name.replaceAll('_', ' ')} ${number(value)}`)
  }
  const verdict = make('span', {class: record.em ? 'ok' : 'bad'}, record.em ? '✓ right' : '✗ wrong')
  const answer = record.prediction ?? null
  layout(record)
  return [
    make('div', {}, verdict, answer === null ? ' · no answer' : ' · ', make('b', {}, answer),
      make('span', {class: 'soft'}, ` · ${facts.filter(Boolean).join(' · ')}`)),
    make('div', {class: 'big'}, drawTree(record, record.extent, 22, width - 16, full, true)), ...textOf(record, found, full)]
}
function showTips(column, record) {
  column.addEventListener('mousemove', (event) => tip(event, record))
  column.addEventListener('mouseleave', () => { $('tip').style.display = 'none' })
}
function tip(event, record) {
  const box = $('tip'), piece = event.target.closest && event.target.closest('span[data-t]')
  if (!piece || !record.spans[piece.dataset.s].ids) { box.style.display = 'none'; return }
  const span = record.spans[piece.dataset.s], i = +piece.dataset.t, lines = [`${JSON.stringify(piece.textContent)}  id ${span.ids[i]}  token ${i + 1} of ${span.ids.length}`]
  for (const name of Object.keys(SIGNALS)) { const v = name === 'mask' ? null : SIGNALS[name].value(span, i); if (v !== null) lines.push(`${name}: ${signed(v, 3)}${name === 'log-probability' ? `  (p = ${Math.exp(v).toPrecision(2)})` : ''}`) }
  const back = at(span.returns, i)
  if (back !== null) lines.push(`return: ${signed(back, 3)}`)
  lines.push(span.trained ? 'trained' : 'not trained')
  box.textContent = lines.join('\n')
  box.style.display = 'block'
  box.style.left = `${Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8)}px`
  box.style.top = `${Math.min(event.clientY + 16, innerHeight - box.offsetHeight - 8)}px`
}
