{{/* Document INDEX of a file, as YAML: (list ROOT PATH INDEX). */}}
{{- define "hetpipe.document" -}}
{{ index (regexSplit "(?m)^---$" ((index . 0).Files.Get (index . 1)) -1) (index . 2) }}
{{- end }}

{{- define "hetpipe.image" -}}
{{ .repository }}:{{ .tag }}{{ with .digest }}@{{ . }}{{ end }}
{{- end }}

{{/* Requests that equal limits. */}}
{{- define "hetpipe.resources" -}}
{{ toYaml (dict "requests" . "limits" .) }}
{{- end }}

{{/* What every object has: label, images. Changes and prints it: (list ROOT OBJECT). */}}
{{- define "hetpipe.finished" -}}
{{- $root := index . 0 }}{{ $object := index . 1 }}
{{- $_ := set $object.metadata "namespace" $root.Release.Namespace }}
{{- $_ := set $object.metadata "labels" (merge (default (dict) $object.metadata.labels) (dict "app.kubernetes.io/name" "hetpipe")) }}
{{- with $object.spec }}{{ with .template }}
{{- $_ := set .metadata "labels" (merge .metadata.labels (dict "app.kubernetes.io/name" "hetpipe")) }}
{{- range concat (default (list) .spec.initContainers) .spec.containers }}
{{- $_ := set . "image" (include "hetpipe.image" (eq .image "redis" | ternary $root.Values.redis.image $root.Values.image)) }}
{{- end }}
{{- if and (eq $root.Values.runs.accessMode "ReadWriteOnce") (ne (index .metadata.labels "app.kubernetes.io/component") "redis") }}
{{- $agents := dict "matchLabels" (dict "app.kubernetes.io/component" "agent") }}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" $agents }}
{{- $_ := set .spec "affinity" (dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term))) }}
{{- end }}
{{- end }}
{{- range .volumeClaimTemplates }}
{{- $_ := set .metadata "labels" (merge (default (dict) .metadata.labels) (dict "app.kubernetes.io/name" "hetpipe")) }}
{{- end }}
{{- end }}
{{- toYaml $object }}
{{- end }}

{{/* With parameterServers.edLocal: at most one pod of a workload's component per node: (list ROOT WORKLOAD). */}}
{{- define "hetpipe.apart" -}}
{{- if (index . 0).Values.parameterServers.edLocal }}
{{- $template := (index . 1).spec.template }}
{{- $_ := unset $template.spec "topologySpreadConstraints" }}
{{- $labels := pick $template.metadata.labels "app.kubernetes.io/component" }}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $labels) }}
{{- $_ := set $template.spec "affinity" (dict "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term))) }}
{{- end }}
{{- end }}

{{/* TLS of a workload: (list ROOT WORKLOAD ROLE VARIABLE IDENTITIES). With a VARIABLE each of its pods has a certificate of its
own, of which it mounts the files; IDENTITIES are the names in them. */}}
{{- define "hetpipe.tls" -}}
{{- $root := index . 0 }}{{ $pod := (index . 1).spec.template.spec }}{{ $role := index . 2 }}{{ $variable := index . 3 }}
{{- $container := index $pod.containers 0 }}
{{- $folder := "/run/hetpipe/tls" }}
{{- if ne $root.Values.tls.mode "off" }}
{{- if ne $role "redis" }}
{{- $_ := set $container "env" (append $container.env (dict "name" "HETPIPE_TLS" "value" $folder)) }}
{{- end }}
{{- $mount := dict "name" "tls" "mountPath" $folder "readOnly" true }}
{{- $mounts := list $mount }}
{{- if $variable }}
{{- $mounts = list (merge (dict "mountPath" (printf "%s/ca.pem" $folder) "subPath" "ca.pem") $mount) }}
{{- range list "cert.pem" "key.pem" }}
{{- $mounts = append $mounts (merge (dict "mountPath" (printf "%s/%s" $folder .) "subPathExpr" (printf "$(%s).%s" $variable .)) $mount) }}
{{- end }}
{{- end }}
{{- $_ := set $container "volumeMounts" (concat $container.volumeMounts $mounts) }}
{{- $volume := dict "name" "tls" }}
{{- if eq $root.Values.tls.mode "secrets" }}
{{- $_ := set $volume "secret" (dict "secretName" (printf "tls-%s" $role) "defaultMode" 256) }}
{{- else }}
{{- $sources := list }}
{{- range $index, $identity := index . 4 }}
{{- $prefix := empty $variable | ternary "" (printf "%s." $identity) }}
{{- $items := list (dict "key" "tls.crt" "path" (printf "%scert.pem" $prefix)) (dict "key" "tls.key" "path" (printf "%skey.pem" $prefix)) }}
{{- if not $index }}{{ $items = prepend $items (dict "key" "ca.crt" "path" "ca.pem") }}{{ end }}
{{- $sources = append $sources (dict "secret" (dict "name" (printf "tls-%s-%s" $role $identity) "items" $items)) }}
{{- end }}
{{- if eq $role "coordinator" }}
{{- $items := list (dict "key" "tls.crt" "path" "signer-cert.pem") (dict "key" "tls.key" "path" "signer-key.pem") }}
{{- $sources = append $sources (dict "secret" (dict "name" "tls-stage-signer" "items" $items)) }}
{{- end }}
{{- $_ := set $volume "projected" (dict "defaultMode" 256 "sources" $sources) }}
{{- end }}
{{- $_ := set $pod "volumes" (append $pod.volumes $volume) }}
{{- end }}
{{- end }}

{{/* Names in the certificates of a role, as a JSON object with the list `names`: (list ROOT ROLE). */}}
{{- define "hetpipe.identities" -}}
{{- $values := (index . 0).Values }}{{ $names := list }}
{{- if eq (index . 1) "parameter-server" }}
{{- range until (int $values.parameterServers.count) }}{{ $names = append $names (toString .) }}{{ end }}
{{- else if eq (index . 1) "agent" }}
{{- range $group := $values.agents }}{{ range until (int $group.nodes) }}{{ $names = append $names (printf "%s-%d" $group.name .) }}{{ end }}{{ end }}
{{- else if eq (index . 1) "operator" }}{{ $names = list "submit" }}
{{- else }}{{ $names = list (index . 1) }}
{{- end }}
{{- toJson (dict "names" $names) }}
{{- end }}

{{/* The Job of one group of agents: (list ROOT GROUP). */}}
{{- define "hetpipe.agents" -}}
{{- $root := index . 0 }}{{ $group := index . 1 }}
{{- $job := include "hetpipe.document" (list $root "files/base/agents/agents.yaml" 0) | fromYaml }}
{{- $pod := $job.spec.template.spec }}{{ $container := index $pod.containers 0 }}
{{- $_ := set $job.metadata "name" (printf "agents-%s" $group.name) }}
{{- range list $job.metadata $job.spec.template.metadata }}
{{- $_ := set .labels "hetpipe/agents" $group.name }}
{{- end }}
{{- include "hetpipe.apart" (list $root $job) }}
{{- $_ := set $job.spec "completions" $group.nodes }}
{{- $_ := set $job.spec "parallelism" $group.nodes }}
{{- $arguments := list }}
{{- range $argument := $container.args }}
{{- if hasPrefix "--allow-modules=" $argument }}
{{- range $root.Values.allowModules }}{{ $arguments = append $arguments (printf "--allow-modules=%s" .) }}{{ end }}
{{- else }}
{{- $arguments = append $arguments $argument }}
{{- end }}
{{- end }}
{{- range $root.Values.allowEnvironment }}{{ $arguments = append $arguments (printf "--allow-environment=%s" .) }}{{ end }}
{{- $resources := deepCopy (default (dict "cpu" "4" "memory" "16Gi") $group.resources) }}
{{- if $group.gpus }}
{{- $_ := set $resources "nvidia.com/gpu" $group.gpus }}
{{- else }}
{{- $arguments = append $arguments (printf "--cpu-devices=%d" (int $group.cpuDevices)) }}
{{- end }}
{{- with $group.product }}{{ $_ := set $pod "nodeSelector" (dict "nvidia.com/gpu.product" .) }}{{ end }}
{{- if eq $root.Values.tls.mode "off" }}{{ $arguments = append $arguments "--insecure" }}{{ end }}
{{- $_ := set $container "args" $arguments }}
{{- $_ := set $container "resources" (include "hetpipe.resources" $resources | fromYaml) }}
{{- if $root.Values.monitoring.enabled }}
{{- range until (int (default $group.cpuDevices $group.gpus)) }}
{{- $_ := set $container "ports" (append $container.ports (dict "name" (printf "stage-metrics-%d" .) "containerPort" (add 7600 .))) }}
{{- end }}
{{- end }}
{{- $names := (include "hetpipe.identities" (list $root "agent") | fromJson).names }}
{{- include "hetpipe.tls" (list $root $job "agent" "AGENT_NAME" $names) }}
{{- include "hetpipe.finished" (list $root $job) }}
{{- end }}

{{/* Has an object begin in the queue of Kueue, if there is one: (list ROOT OBJECT). */}}
{{- define "hetpipe.queued" -}}
{{- $object := index . 1 }}
{{- with (index . 0).Values.kueue.queue }}
{{- $_ := set $object.metadata.labels "kueue.x-k8s.io/queue-name" . }}
{{- $_ := set $object.spec "suspend" true }}
{{- end }}
{{- end }}
