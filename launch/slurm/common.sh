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
# GRACE_SECONDS       limit for the checkpoint after a signal (default: until 45 s before Slurm ends the job, at most 3600)
# FARM_PORT           train_split.sh: port of the browsers' router; the browser servers use the next one (default: 8700)
# DRY_RUN             1: print each process with its node and command, and start nothing; needs no Slurm
# STUB_COMMAND        command that replaces every trainer rank and rollout worker, on the same cores and devices
if [ -n "${MODULES:-}" ] && ! type module >/dev/null 2>&1; then
    for file in /etc/profile.d/{lmod,z00_lmod,modules}.sh; do [ ! -r "$file" ] || source "$file"; done
fi
for module in ${MODULES:-}; do module load "$module" || exit; done
set -euo pipefail

PYTHON=${PYTHON:-$PWD/.venv/bin/python}
STEP_EXIT_SECONDS=${STEP_EXIT_SECONDS:-120}

log() { echo "job: $*"; }

# webrl ARGUMENTS: runs webrl on this node, in the container if apptainer runs it.
webrl() { "${CONTAINER_COMMAND[@]}" "$PYTHON" -m megatron_webrl.cli "$@"; }

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
        "${CONTAINER_COMMAND[@]}" "$PYTHON" -m megatron_webrl.cli "$@"
}

# start_step ROLE: runs a step of the job; if it fails, the job ends with that reason, unless it has ended before.
start_step() {
    local role=$1 code=0
    run_on "$NODES" node "$role" "$SETTINGS" "${STUB_ARGUMENTS[@]}" || code=$?
    [ "$code" = 0 ] || run_on "$FIRST" node stop "$SETTINGS" --failed "the $role step ended with code $code"
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

# start_browser_farm CONFIG OVERRIDES: starts router and browser servers on the second component of a heterogeneous job.
start_browser_farm() {
    local nodes port=${FARM_PORT:-8700}
    [ -z "${DRY_RUN:-}" ] || return 0
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
    export WEBRL_BROWSERS_TOKEN=${WEBRL_BROWSERS_TOKEN:-$(head -c 24 /dev/urandom | base64)}
    local address
    address=$(address_of "${nodes[0]}")
    FARM=http://$address:$port
    log "browsers on ${#nodes[@]} nodes: $SLURM_JOB_NODELIST_HET_GROUP_1, router $FARM"
    GROUP=1 run_on "${nodes[0]}" browsers route --die-with-parent --host "$address" --port "$port" &
    GROUP=1 run_on "${nodes[*]}" node browsers "$@" --router "$FARM" --port $((port + 1)) --nodes "${#nodes[@]}" &
}

# job_field FIELD: prints a field of this job from scontrol.
job_field() { scontrol show job --oneliner "$SLURM_JOB_ID" | awk -v field="$1=" 'NR == 1 { for (i = 1; i <= NF; i++)
    if (index($i, field) == 1) print substr($i, length(field) + 1) }'; }

# preempted: whether the job runs in the grace period of a pre-emption.
preempted() {
    [ "$(job_field JobState)" = RUNNING ] || return 1
    case $(job_field PreemptTime) in "" | None) return 1 ;; esac
}

# handle_signal SIGNAL: trap for a notice that the job will end soon: near the time limit (sbatch --signal), or pre-empted.
# It requests a checkpoint and the end of the run. The SIGTERM of scancel and of the time limit itself ends the script.
handle_signal() {
    local end seconds=3600 now
    if [ "$1" = TERM ] && ! preempted; then
        log "ended by SIGTERM"
        exit 143
    fi
    [ -z "$NOTICE" ] || return 0
    NOTICE=SIG$1
    now=$(date +%s)
    end=$(job_field EndTime) # "Unknown" without a limit
    if [ -n "$end" ] && end=$(date -d "$end" +%s 2>/dev/null); then
        seconds=$((end - now - 45)) # time to end all roles, and to requeue
        seconds=$((seconds > 3600 ? 3600 : seconds < 10 ? 10 : seconds))
    fi
    seconds=${GRACE_SECONDS:-$seconds}
    DEADLINE=$((SECONDS + seconds))
    log "$NOTICE: the job will end; $seconds s left for a checkpoint"
    [ -z "${CONTROL:-}" ] || run_on "$FIRST" node stop "$SETTINGS" --preempted &
}

# requeue REASON: requeues the job, which will resume from its newest checkpoint; Slurm ends what still runs.
requeue() {
    trap '' USR1 TERM
    [ "$(job_field JobState)" = RUNNING ] || exit 1 # it was cancelled
    log "$1; requeueing the job"
    scontrol requeue "$SLURM_JOB_ID" || { log "requeue failed: submit the job again with run.resume=true"; exit 1; }
    exit 0
}

# deadline_passed: ends the job as failed and requeues it: its current update takes longer than the time left.
deadline_passed() {
    local since=$SECONDS reason="no checkpoint in time after $NOTICE"
    run_on "$FIRST" node stop "$SETTINGS" --failed "$reason" || true
    while kill -0 "$CONTROL" 2>/dev/null && ((SECONDS - since < 20)); do sleep 1; done # until the summary is written
    requeue "$reason: resuming from the last one"
}

# exit_without_nodes CODE: exits because no nodes were chosen. A requeued job is held instead, and keeps its queue position.
exit_without_nodes() {
    if [ "$1" = 76 ] && [ "${SLURM_RESTART_COUNT:-0}" != 0 ]; then
        trap '' USR1 TERM
        log "holding the job; to continue: scontrol update JobId=$SLURM_JOB_ID ExcNodeList=NODES; scontrol release $SLURM_JOB_ID"
        scontrol requeuehold "$SLURM_JOB_ID" && exit 0
    fi
    exit "$1"
}

# run_job CONFIG OVERRIDES: runs the job on the nodes that Slurm allocated.
run_job() {
    local allocated restarts=${SLURM_RESTART_COUNT:-0}
    STUB_ARGUMENTS=(${STUB_COMMAND:+--stub-command "$STUB_COMMAND"})
    if [ -n "${DRY_RUN:-}" ]; then
        webrl node commands "$@" "${STUB_ARGUMENTS[@]}"
        return
    fi
    mapfile -t allocated < <(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}")
    NOTICE="" DEADLINE=0
    trap 'handle_signal USR1' USR1
    trap 'handle_signal TERM' TERM
    log "${SLURM_JOB_ID} on ${#allocated[@]} nodes: ${SLURM_JOB_NODELIST}$( ((restarts == 0)) || echo ", restart $restarts")"
    SETTINGS=$(run_on "${allocated[0]}" node prepare "$@" "${STUB_ARGUMENTS[@]}" ${FARM:+--farm "$FARM"} | tail -n 1)
    log "configuration: $SETTINGS"
    local unchecked=()
    if [ "${PREFLIGHT:-1}" = 0 ]; then
        unchecked=(--unchecked)
    else
        # A check that hangs or crashes must not end the checks of the other nodes.
        SRUN_OPTIONS="--kill-on-bad-exit=0 --time=20" run_on "${allocated[*]}" node check "$SETTINGS" "${allocated[@]}" \
            --first-address "$(address_of "${allocated[0]}")" --min-gib-per-second "${MIN_GIB_PER_SECOND:-0}" ||
            log "the check did not finish on every node"
    fi
    NODES=$(run_on "${allocated[0]}" node choose "$SETTINGS" "${allocated[@]}" "${unchecked[@]}") || exit_without_nodes "$?"
    FIRST=${NODES%% *}
    log "nodes: $NODES"
    [ -z "$NOTICE" ] || requeue "$NOTICE before the start"
    run_on "$FIRST" node control "$SETTINGS" --host "$(address_of "$FIRST")" &
    CONTROL=$!
    start_step rollout &
    local rollout=$!
    start_step trainer &
    local trainer=$! outcome=0
    while kill -0 "$CONTROL" 2>/dev/null; do # a signal would interrupt `wait`
        [ -z "$NOTICE" ] || ((SECONDS < DEADLINE)) || deadline_passed
        sleep 1
    done
    wait "$CONTROL" || outcome=$?
    local since=$SECONDS
    while { kill -0 "$rollout" || kill -0 "$trainer"; } 2>/dev/null; do
        if ((SECONDS - since > STEP_EXIT_SECONDS)) || { [ -n "$NOTICE" ] && ((SECONDS >= DEADLINE)); }; then
            log "killing a step that did not exit within $((SECONDS - since)) s"
            break
        fi
        sleep 1
    done
    case $outcome in
        0) ;;
        75) requeue "pre-empted, with a checkpoint" ;;
        *) if [ -n "$NOTICE" ] || preempted; then requeue "the job failed after a notice of its end"; fi ;;
    esac
    return "$outcome" # Slurm ends what still runs with the script
}

case ${CONTAINER:-} in
    "") CONTAINER_COMMAND=() CONTAINER_OPTIONS=() ;;
    *.sif)
        CONTAINER_COMMAND=(apptainer exec --nv --bind "$PWD${MOUNTS:+,$MOUNTS}" --pwd "$PWD" "$CONTAINER")
        CONTAINER_OPTIONS=()
        ;;
    *)
        CONTAINER_COMMAND=()
        CONTAINER_OPTIONS=(--container-image="$CONTAINER" --container-mounts="$PWD:$PWD${MOUNTS:+,$MOUNTS}" --container-workdir="$PWD")
        ;;
esac
