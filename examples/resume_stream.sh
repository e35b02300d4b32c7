#!/usr/bin/env bash
# Cuts an event stream in the middle and goes on after the last event received: nothing lost, nothing twice.
# Run `make serve` in another terminal, then: examples/resume_stream.sh [URL]
# Where the gateway asks for a key, ROPEWAY_API_KEY has it.
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
if [ -n "${ROPEWAY_API_KEY:-}" ]; then  # by a file that curl reads, since others see its arguments
    events() { curl -sN --config <(printf 'header = "Authorization: Bearer %s"\n' "$ROPEWAY_API_KEY") "$@"; }
else
    events() { curl -sN "$@"; }
fi
ropeway=${ROPEWAY:-$(dirname "$0")/../.venv/bin/ropeway}

# ignore_eos: the answer has its full length, so that there is a middle to cut in.
job=$("$ropeway" submit "Tell me a story about a cable car." --url "$url" --max-tokens 80 --field ignore_eos=true --no-wait)
echo "job $job"

# The first eight events, then the connection is dropped.
first=$(events "$url/v1/jobs/$job/events" | grep --line-buffered '^id: ' | head -n 8 || true)
last=$(tail -n 1 <<<"$first" | sed 's/^id: //')
echo "cut after event $last"

rest=$(events "$url/v1/jobs/$job/events" -H "Last-Event-ID: $last" | grep '^id: ')
echo "resumed with event $(head -n 1 <<<"$rest" | sed 's/^id: //'), ended with $(tail -n 1 <<<"$rest" | sed 's/^id: //')"

count=$(printf '%s\n%s\n' "$first" "$rest" | sort -u | wc -l)
echo "$count different events in all"
[ "$count" -eq "$(tail -n 1 <<<"$rest" | sed 's/^id: //')" ]
