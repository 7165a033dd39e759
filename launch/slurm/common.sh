# Sourced by the scripts of this folder, which sbatch runs on the first node of a job. docs/slurm.md describes the job.
#
# CONFIG              YAML file; each script has its own default. Arguments of the script are overrides: trainer.updates=10
# PYTHON              the Python that has this package (default: .venv/bin/python)
# MODULES             modules to load first, separated by spaces
# CONTAINER           image to run everything in: *.sif with apptainer, anything else with pyxis/enroot
# MOUNTS              more folders to mount in the container, A:B,C:D (the folder of submission is always mounted)
# PREFLIGHT           0: use all nodes without a check
# MIN_GIB_PER_SECOND  GiB/s that a node must exchange with a neighbour to pass the check (default: 0, any)
# STEP_EXIT_SECONDS   limit for both steps to exit after the end of the job (default: 120)
# GRACE_SECONDS       limit for the checkpoint after a signal (default: until 45 s before Slurm ends the job, at most 7200)
# BROWSER_SERVER_PORT train_split.sh: port of the browser servers (default: 8700)
# GPU_CHECK_OPTIONS   gpu_check.sh: options of `webrl check gpu`, such as --quick or "--section links"
# DRY_RUN             1: print each process with its node and command, and start nothing; needs no Slurm
# STUB_COMMAND        command that replaces every trainer rank and rollout worker, on the same cores and devices
if [ -n "${MODULES:-}" ] && ! type module >/dev/null 2>&1; then
    for file in /etc/profile.d/{lmod,z00_lmod,modules}.sh; do [ ! -r "$file" ] || source "$file"; done
fi
for module in ${MODULES:-}; do module load "$module" || exit; done
set -euo pipefail
umask 077 # what a job writes is its owner's

PYTHON=${PYTHON:-$PWD/.venv/bin/python}
BROWSER_SERVER_STEPS=()
STEP_EXIT_SECONDS=${STEP_EXIT_SECONDS:-120}

log() { echo "job: $*"; }

# webrl ARGUMENTS: runs webrl on this node, in the container if apptainer runs it.
webrl() { "${CONTAINER_COMMAND[@]}" "$PYTHON" -m megatron_webrl "$@"; }

# check_python: exits if PYTHON, which is the image's for a job with pyxis, does not import this package on this machine.
check_python() {
    local error
    [ "${#CONTAINER_COMMAND[@]}" = 0 ] || return 0
    if ! error=$("$PYTHON" -c 'import megatron_webrl.cli' 2>&1); then
        log "DRY_RUN runs PYTHON=$PYTHON on this machine, which lacks what it needs: ${error##*$'\n'}; give the Python of" \
            "an environment with this package (docs/slurm.md, \"From clone to sbatch\")" >&2
        exit 1
    fi
}

# run_on "NODES" ARGUMENTS: runs webrl once on each of these nodes, as one step of the job.
run_on() {
    local nodes count
    read -ra nodes <<<"$1"
    count=${#nodes[@]}
    shift
    # The placement binds processes to cores, so Slurm must not. The steps share all GPUs and memory of the nodes.
    srun --overlap ${GROUP:+--het-group="$GROUP"} --nodes="$count" --ntasks="$count" --ntasks-per-node=1 \
        --nodelist="$(IFS=,; echo "${nodes[*]}")" --cpu-bind=none --mem-bind=none --mpi=none --unbuffered \
        ${SRUN_OPTIONS:---kill-on-bad-exit=1} "${CONTAINER_OPTIONS[@]}" \
        "${CONTAINER_COMMAND[@]}" "$PYTHON" -m megatron_webrl "$@"
}

# create_containers "NODES": with pyxis, creates the container of the job on these nodes, which all later steps use. Two
# steps that start at once on a node without it would both create it, and one of them would fail.
create_containers() {
    local nodes
    [ "${#CONTAINER_OPTIONS[@]}" != 0 ] || return 0
    read -ra nodes <<<"$1"
    srun --overlap ${GROUP:+--het-group="$GROUP"} --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 \
        --nodelist="$(IFS=,; echo "${nodes[*]}")" --mpi=none --kill-on-bad-exit=0 "${CONTAINER_OPTIONS[@]}" true ||
        log "the container was not created on every node; the next step tries again"
}

# start_step ROLE: runs a step of the job; if it fails, the job ends with that reason, unless it has ended before.
start_step() {
    local role=$1 code=0 reason=--failed
    run_on "$NODES" node "$role" "$SETTINGS" "${STUB_ARGUMENTS[@]}" || code=$?
    [ "$code" != 137 ] || reason=--lost # a supervisor was killed by SIGKILL: no role's failure does that
    [ "$code" = 0 ] || run_on "$FIRST" node stop "$SETTINGS" $reason "the $role step ended with code $code"
}

# address_of NODE: prints the address at which other nodes reach it.
address_of() {
    local name ip
    name=$(scontrol show node --oneliner "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    name=${name:-$1}
    ip=$(getent ahostsv4 "$name" | awk 'NR == 1 { print $1 }')
    if [[ $ip == 127.* && $name != 127.* ]]; then # some systems map the node's own name to 127.0.1.1 in /etc/hosts
        ip=$(hostname -I | awk '{ print $1 }')
    fi
    echo "${ip:-$name}"
}

# export_job_addresses: sets WEBRL_JOB_ADDRESSES to all addresses of the job's nodes, which pages must not reach.
export_job_addresses() {
    local group names=()
    for group in "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}" ${SLURM_JOB_NODELIST_HET_GROUP_1:-}; do
        mapfile -t -O "${#names[@]}" names < <(scontrol show hostnames "$group"
            scontrol show node --oneliner "$group" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    done
    WEBRL_JOB_ADDRESSES=$(getent ahosts "${names[@]}" | awk '{ print $1 }' | sort -u | paste -sd,) || true
    export WEBRL_JOB_ADDRESSES
}

# start_browser_servers CONFIG OVERRIDES: starts browser servers on the second component of a heterogeneous job.
start_browser_servers() {
    local node nodes addresses=()
    [ -z "${DRY_RUN:-}" ] || return 0
    export_job_addresses
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
    export WEBRL_BROWSERS_TOKEN=${WEBRL_BROWSERS_TOKEN:-$(head -c 24 /dev/urandom | base64)}
    for node in "${nodes[@]}"; do
        addresses+=("http://$(address_of "$node"):${BROWSER_SERVER_PORT:-8700}")
    done
    BROWSER_SERVERS=$(IFS=,; echo "${addresses[*]}")
    log "browsers on ${#nodes[@]} nodes: $SLURM_JOB_NODELIST_HET_GROUP_1"
    GROUP=1 create_containers "${nodes[*]}"
    # Workers do without a server that has ended.
    GROUP=1 SRUN_OPTIONS=--kill-on-bad-exit=0 run_on "${nodes[*]}" node browsers "$@" --servers "$BROWSER_SERVERS" &
    BROWSER_SERVER_STEPS=($!)
}

# job_field FIELD: prints a field of this job from scontrol; nothing if Slurm does not answer.
job_field() {
    { scontrol show job --oneliner "$SLURM_JOB_ID" || true; } | awk -v field="$1=" 'NR == 1 {
        for (i = 1; i <= NF; i++) if (index($i, field) == 1) print substr($i, length(field) + 1) }'
}

# preempted: whether the job runs in the grace period of a pre-emption.
preempted() {
    [ "$(job_field JobState)" = RUNNING ] || return 1
    case $(job_field PreemptTime) in "" | None) return 1 ;; esac
}

# handle_signal SIGNAL: trap for a notice that the job will end soon: near the time limit (sbatch --signal), or pre-empted.
# It requests a checkpoint and the end of the run. The SIGTERM of scancel and of the time limit itself ends the script.
handle_signal() {
    local end seconds=7200 now
    if [ "$1" = TERM ] && ! preempted; then
        log "ended by SIGTERM"
        exit 143
    fi
    [ -z "$NOTICE" ] || return 0
    NOTICE=SIG$1
    now=$(date +%s)
    end=$(job_field EndTime) # "Unknown" without a limit
    if [ -z "$end" ]; then
        seconds=240 # Slurm, which gives the notice 300 s before the end, does not answer
    elif end=$(date -d "$end" +%s 2>/dev/null); then
        seconds=$((end - now - 45)) # time to end all roles, and to requeue
        seconds=$((seconds > 7200 ? 7200 : seconds < 10 ? 10 : seconds))
    fi
    seconds=${GRACE_SECONDS:-$seconds}
    DEADLINE=$((SECONDS + seconds))
    log "$NOTICE: the job will end$([ -z "${SAVES:-}" ] || echo "; $seconds s left for a checkpoint")"
    [ -z "${CONTROL:-}" ] || run_on "$FIRST" node stop "$SETTINGS" --preempted &
}

# requeue REASON: requeues the job, which resumes from its newest checkpoint, if any; Slurm ends what still runs.
requeue() {
    trap '' USR1 TERM
    case $(job_field JobState) in "" | RUNNING) ;; *) exit 1 ;; esac # it was cancelled
    log "$1; requeueing the job"
    for pause in 1 2 4 5 0; do
        scontrol requeue "$SLURM_JOB_ID" && exit 0
        sleep $pause
    done
    log "requeue failed: submit the job again with run.resume=true"
    exit 1
}

# deadline_passed: ends the job as failed and requeues it: its current update takes longer than the time left.
deadline_passed() {
    local since=$SECONDS reason="no checkpoint in time after $NOTICE"
    run_on "$FIRST" node stop "$SETTINGS" --failed "$reason" || true
    while kill -0 "$CONTROL" 2>/dev/null && ((SECONDS - since < 20)); do sleep 1; done # until the summary is written
    requeue "$reason: resuming from the last one"
}

# requeue_if_ending: requeues the job if a notice of its end has come before its start, of which its steps may have died.
requeue_if_ending() { if [ -n "$NOTICE" ] || preempted; then requeue "${NOTICE:-pre-empted} before the start"; fi; }

# exit_unprepared CODE: exits because the preparation failed.
exit_unprepared() {
    requeue_if_ending
    exit "$1"
}

# exit_without_nodes CODE: exits because no nodes were chosen. A requeued job is held instead, and keeps its queue position.
exit_without_nodes() {
    requeue_if_ending
    if [ "$1" = 76 ] && [ "${SLURM_RESTART_COUNT:-0}" != 0 ]; then
        trap '' USR1 TERM
        log "holding the job; to continue: scontrol update JobId=$SLURM_JOB_ID ExcNodeList=NODES; scontrol release $SLURM_JOB_ID"
        scontrol requeuehold "$SLURM_JOB_ID" && exit 0
    fi
    exit "$1"
}

# begin_job: sets ALLOCATED to the nodes that Slurm allocated, and handles its signals from here on.
begin_job() {
    local restarts=${SLURM_RESTART_COUNT:-0}
    mapfile -t ALLOCATED < <(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}")
    export_job_addresses
    NOTICE="" DEADLINE=0
    trap 'handle_signal USR1' USR1
    trap 'handle_signal TERM' TERM
    log "${SLURM_JOB_ID} on ${#ALLOCATED[@]} nodes: ${SLURM_JOB_NODELIST}$( ((restarts == 0)) || echo ", restart $restarts")"
    create_containers "${ALLOCATED[*]}"
}

# check_nodes: checks the nodes, each by itself and with the others; the reports are in the folder of the run.
check_nodes() {
    # A check that hangs or crashes must not end the checks of the other nodes.
    SRUN_OPTIONS="--kill-on-bad-exit=0 --time=20" run_on "${ALLOCATED[*]}" check node "$SETTINGS" "${ALLOCATED[@]}" \
        --first-address "$(address_of "${ALLOCATED[0]}")" --min-gib-per-second "${MIN_GIB_PER_SECOND:-0}" ||
        log "the check did not finish on every node"
}

# choose_nodes: checks the nodes, and sets NODES to those that the job uses, FIRST to the first of them.
choose_nodes() {
    local unchecked=()
    log "configuration: $SETTINGS"
    if [ "${PREFLIGHT:-1}" = 0 ]; then unchecked=(--unchecked); else check_nodes; fi
    NODES=$(run_on "${ALLOCATED[0]}" node choose "$SETTINGS" "${ALLOCATED[@]}" "${unchecked[@]}") || exit_without_nodes "$?"
    FIRST=${NODES%% *}
    log "nodes: $NODES"
}

# run_processes ROLES: runs `webrl node control` on the first node and a step for each role, until the job ends.
run_processes() {
    local role steps=() outcome=0
    requeue_if_ending
    run_on "$FIRST" node control "$SETTINGS" --host "$(address_of "$FIRST")" &
    CONTROL=$!
    for role in "$@"; do
        start_step "$role" &
        steps+=($!)
    done
    while kill -0 "$CONTROL" 2>/dev/null; do # a signal would interrupt `wait`
        [ -z "$NOTICE" ] || ((SECONDS < DEADLINE)) || deadline_passed
        if one_ended "${BROWSER_SERVER_STEPS[@]}" &&
            run_on "$FIRST" node stop "$SETTINGS" --lost "all browser servers ended"; then
            BROWSER_SERVER_STEPS=() # otherwise again: the control service may only be starting
        fi
        sleep 1
    done
    wait "$CONTROL" || outcome=$?
    local since=$SECONDS
    while any_runs "${steps[@]}"; do
        if ((SECONDS - since > STEP_EXIT_SECONDS)) || { [ -n "$NOTICE" ] && ((SECONDS >= DEADLINE)); }; then
            log "killing a step that did not exit within $((SECONDS - since)) s"
            break
        fi
        sleep 1
    done
    case $outcome in
        0) ;;
        74 | 137) requeue "the infrastructure failed" ;; # 137: the host itself was killed by SIGKILL
        75) requeue "pre-empted${SAVES:+, with a checkpoint}" ;;
        *) if [ -n "$NOTICE" ] || preempted; then requeue "the job failed after a notice of its end"; fi ;;
    esac
    return "$outcome" # Slurm ends what still runs with the script
}

# any_runs PROCESSES: whether any of these processes of the script runs.
any_runs() {
    local process
    for process in "$@"; do
        if kill -0 "$process" 2>/dev/null; then return 0; fi
    done
    return 1
}

# one_ended PROCESSES: whether one of these processes of the script has ended.
one_ended() {
    local process
    for process in "$@"; do
        kill -0 "$process" 2>/dev/null || return 0
    done
    return 1
}

# run_job CONFIG OVERRIDES: trains on the nodes that Slurm allocated.
run_job() {
    STUB_ARGUMENTS=(${STUB_COMMAND:+--stub-command "$STUB_COMMAND"}) SAVES=1
    if [ -n "${DRY_RUN:-}" ]; then
        check_python
        webrl node commands "$@" "${STUB_ARGUMENTS[@]}"
        return
    fi
    begin_job
    SETTINGS=$(run_on "${ALLOCATED[0]}" node prepare "$@" "${STUB_ARGUMENTS[@]}" ${BROWSER_SERVERS:+--servers "$BROWSER_SERVERS"} | tail -n 1) ||
        exit_unprepared "$?"
    choose_nodes
    run_processes rollout trainer
}

# run_evaluation CHECKPOINT [CONFIG] [OVERRIDES]: evaluates on the nodes that Slurm allocated, all of them by default.
run_evaluation() {
    local size=(--nodes "${SLURM_JOB_NUM_NODES:-1}")
    STUB_ARGUMENTS=(${STUB_COMMAND:+--stub-command "$STUB_COMMAND"})
    if [ -n "${DRY_RUN:-}" ]; then
        check_python
        webrl node prepare-eval "$@" "${size[@]}" --dry-run "${STUB_ARGUMENTS[@]}"
        return
    fi
    begin_job
    SETTINGS=$(run_on "${ALLOCATED[0]}" node prepare-eval "$@" "${size[@]}" "${STUB_ARGUMENTS[@]}" | tail -n 1) ||
        exit_unprepared "$?"
    choose_nodes
    run_on "$FIRST" node convert "$SETTINGS" || exit_unprepared "$?"
    run_processes rollout
}

# run_gpu_check CONFIG OVERRIDES: checks all nodes with each other, and the first one whole; then runs a short job as
# run_job does, and adds it to the report.
run_gpu_check() {
    local node reports=() checked report watcher outcome=0
    if [ -z "${SLURM_JOB_ID:-}" ]; then
        log "checks nodes of a Slurm job; submit it: sbatch launch/slurm/gpu_check.sh. One machine alone: webrl check gpu"
        exit 2
    fi
    begin_job
    requeue() { # not the check: what fails is a line of its report
        log "$1"
        exit 1
    }
    FIRST=${ALLOCATED[0]} STUB_ARGUMENTS=()
    # A stub: a package or model that is missing shall be a line of the report, not the end of the check.
    checked=$(run_on "$FIRST" node prepare "$@" run.name="gpu-check-$SLURM_JOB_ID" --stub-command none | tail -n 1)
    SETTINGS=$checked report=$(dirname "$checked")/gpu-check.json
    log "configuration: $SETTINGS"
    check_nodes
    for node in "${ALLOCATED[@]}"; do reports+=(--node-report "$(dirname "$checked")/nodes/$node.json"); done
    # shellcheck disable=SC2086  # several options
    run_on "$FIRST" check gpu "$checked" "${reports[@]}" --json "$report" --job-file "${report%/*}/job.yaml" \
        ${GPU_CHECK_OPTIONS:-} || outcome=$?
    [ -e "${report%/*}/job.yaml" ] || return "$outcome"
    if NODES=$(run_on "$FIRST" node choose "$checked" "${ALLOCATED[@]}") &&
        SETTINGS=$(run_on "$FIRST" node prepare "${report%/*}/job.yaml" | tail -n 1); then
        FIRST=${NODES%% *}
        log "short job on $NODES: $SETTINGS"
        run_on "$FIRST" check job "$SETTINGS" "$report" &
        watcher=$!
        (run_processes rollout trainer) || log "the short job failed"
        wait "$watcher"
    else
        run_on "$FIRST" check job "${report%/*}/job.yaml" "$report"
    fi
}

case ${CONTAINER:-} in
    "") CONTAINER_COMMAND=() CONTAINER_OPTIONS=() ;;
    *.sif)
        CONTAINER_COMMAND=(apptainer exec --nv --bind "$PWD${MOUNTS:+,$MOUNTS}" --pwd "$PWD" "$CONTAINER")
        CONTAINER_OPTIONS=()
        ;;
    *)
        # A named container is created by the first step of a node and used by the others, or each `srun` would unpack
        # the image again. no_exec (pyxis 0.14 and later): a step starts in namespaces of its own, with its own mounts;
        # without it, it would join those of a step that runs, and fail if that step ends meanwhile.
        CONTAINER_COMMAND=()
        CONTAINER_OPTIONS=(
            --container-image="$CONTAINER" --container-name="webrl-${SLURM_JOB_ID:-0}:no_exec"
            --container-mounts="$PWD:$PWD${MOUNTS:+,$MOUNTS}" --container-workdir="$PWD"
        )
        ;;
esac
