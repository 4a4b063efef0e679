"""relay.py OUT [mlflow]: hands each line of a run's metrics.jsonl and events.jsonl to wandb (or MLflow) as it is written."""
import json, os, sys, time
out, ended, at = sys.argv[1], False, {"events.jsonl": 0, "metrics.jsonl": 0}
if sys.argv[2:] == ["mlflow"]:
    import mlflow; mlflow.start_run(run_name=out); send = lambda step, values: mlflow.log_metrics(values, step=step)
else:
    import wandb; run = wandb.init(project="zero", name=out); run.define_metric("*", step_metric="step")
    send = lambda step, values: run.log({"step": step, **values})
while not ended:                                           # until the last event is "end" or "stop"
    time.sleep(2)
    for name in filter(lambda name: os.path.exists(f"{out}/{name}"), at):
        with open(f"{out}/{name}", "rb") as file:
            file.seek(at[name] if at[name] <= os.path.getsize(file.name) else 0)      # after a resume
            for line in filter(lambda line: line.endswith(b"\n"), iter(file.readline, b"")):
                at[name] = file.tell()
                try: line = json.loads(line)
                except ValueError: continue                # of a file that a resume has written anew
                values = {f"{line['kind']}/{key}": value for key, value in line.get("values", [])} if "kind" in line else line
                send(line["step"], {key: float(value) for key, value in values.items() if isinstance(value, (int, float))})
                ended = line["kind"] in ("end", "stop") if "kind" in line else ended
